"""Where training begins: the closed-form start of recurrent heads, or heads that were trained before.

Knows: how many positions of which batches go into the fit, how to tell of its progress, and whether earlier heads are
those that a configuration describes. Refuses to know: the fit itself (`mtp.least_squares`), and which start is wanted.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, RecurrentHeads, build_heads
from mtp.hub import find_heads, load_heads
from mtp.initialise import describe
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


def earlier_heads(name: str, options: HeadsOptions, base: FrozenBase) -> Heads:
    """The heads in a folder or of the package, ready to be trained further on `base`.

    Recurrent heads may go on with another draft length: one block serves all of their positions.
    UserError unless they are what `options` describe otherwise, and belong to this base.
    """
    try:
        heads = load_heads(find_heads(name))
    except UserError as error:  # said for the option of decoding
        raise UserError(str(error).replace("--heads", "model.start_from")) from None
    have = heads.config
    if have.base.fingerprint != base.fingerprint():
        raise UserError(
            f"model.start_from {name} has heads for {have.base.name}, and model.base.name is {base.name}, which "
            "differs in weights; train heads for the base they belong to."
        )
    if have.kind == options.kind == "recurrent" and have.draft_length != options.draft_length:
        heads = unrolled(heads, options.draft_length)
    have, want = heads.config, describe(options, base, heads.draft_ids)
    differ = [
        f"{key} {getattr(have, key)} instead of {getattr(want, key)}"
        for key in vars(want)
        if key not in ("base", "init", "draft_vocab_hash") and getattr(have, key) != getattr(want, key)
    ]
    if options.draft_vocab_size != have.draft_vocab_size:
        differ.append(f"draft_vocab_size {have.draft_vocab_size} instead of {options.draft_vocab_size}")
    if differ:
        raise UserError(f"model.start_from {name} has {'; '.join(differ)}; set model.heads as those heads are.")
    heads.to(base.device).bind(base.embedding, base.output_matrix)
    return heads


def unrolled(heads: Heads, draft_length: int) -> Heads:
    """Recurrent heads of the same weights for another K."""
    other = build_heads(replace(heads.config, draft_length=draft_length))
    other.load_state_dict(heads.state_dict())
    return other
