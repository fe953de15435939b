"""The closed-form start of recurrent heads, fitted on training batches before the first step.

Knows: how many positions of which batches go into the fit, and how to tell of its progress. Refuses to know: the fit
itself (`mtp.least_squares`), and when a start is wanted.
"""

from collections.abc import Callable, Iterable

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.heads import RecurrentHeads
from mtp.least_squares import Moments, start_from_states
from mtp.targets import neighbours
from train.loader import Batch

Tell = Callable[[int, int], None]


def start_heads(
    heads: RecurrentHeads, base: FrozenBase, batches: Iterable[Batch], positions: int, tell: Tell | None = None
) -> None:
    """Set the heads' weights from about `positions` supervised positions, fewer where the batches end before.

    `tell(done, total)` has done = total once, at the end. The batches should be those of all ranks, so that the start
    does not depend on how many there are. Ranks agree to the last bit because DDP and FSDP begin with the weights of
    rank 0.
    """
    moments, tell = Moments(heads), tell or (lambda done, total: None)
    for batch in batches:
        tokens = batch["tokens"].to(base.device)
        segments = batch["segments"].to(base.device) if "segments" in batch else None
        here, after, next_tokens = neighbours(tokens, batch["supervised"].to(base.device), segments)
        output = base.forward(tokens, feature_layers=heads.config.feature_layers, segments=segments)
        features, states = output.features.flatten(0, 1), output.hidden.flatten(0, 1)
        moments.add(features[here], states[here], next_tokens, states[after])
        if moments.count >= positions:
            break
        tell(moments.count, positions)
    if not moments.count:
        raise UserError("data.train has no supervised token behind two others, so nothing can be drafted; correct it.")
    start_from_states(heads, moments)
    tell(moments.count, moments.count)
