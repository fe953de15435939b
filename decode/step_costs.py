"""What steps cost on this machine with every K, for `--draft-length auto`.

Knows: which measurement stands for a chain, a tree and a batch. Refuses to know: how a K is chosen from them
(`decode.draft_length`), and how one measures (`decode.costs`).
"""

from collections.abc import Callable

from torch import Tensor

from decode.chain import Drafting
from decode.costs import measure_drafts_together, measure_steps, measure_trees
from decode.draft_length import StepCosts
from decode.target import BaseTarget
from decode.together import Copies
from decode.tree_shape import TreeShape
from mtp.base import FrozenBase


def measure(
    base: FrozenBase, drafting: Callable[[], Drafting], rows: Tensor, batch_size: int, tree: str | None
) -> StepCosts:
    """In about a second, behind the text of `drafting`, with up to as many drafts as there are tokens in `rows` [K]; in
    a batch, the share of one of its texts."""
    most, given = len(rows), drafting()
    if tree is not None:
        shape = TreeShape.parse(tree)
        return StepCosts(*measure_trees(BaseTarget(base), given, shape, shape.depth or most))
    if batch_size == 1:
        forward, draft = measure_steps(BaseTarget(base), given, rows, most)
    else:
        copies = [drafting() for _ in range(batch_size)]
        draft = measure_drafts_together(BaseTarget(base), copies, most)
        forward, _ = measure_steps(Copies(base, batch_size), given, rows, 0, rounds=2)  # these take long
    assert draft is not None
    return StepCosts.of_parts([seconds / batch_size for seconds in forward], draft)
