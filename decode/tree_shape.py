"""The shape of a tree of drafts, as a request names it.

Knows: the two spellings and their limits. Refuses to know how a tree is grown.
"""

import math
from dataclasses import dataclass

from mtp.errors import UserError

MAX_NODES = 512
TREE_RULE = {"token": "recursive", "block": "traversal", "match": "match", "greedy": "match"}
"""The rule for trees that a rule for chains becomes; at temperature 0, p is one-hot and match follows its maximum."""


@dataclass(frozen=True)
class TreeShape:
    """`widths`: children of every node, per level; or `nodes`: how many of the likeliest nodes to keep."""

    widths: tuple[int, ...] = ()
    nodes: int = 0

    @classmethod
    def parse(cls, text: str) -> "TreeShape":
        """From `3,2,1` or `dynamic:16`; anything else is a UserError."""
        name, _, number = text.partition(":")
        try:
            if name == "dynamic":
                shape = cls(nodes=int(number))
                size = shape.nodes
            else:
                shape = cls(widths=tuple(int(width) for width in text.split(",")))
                size = sum(math.prod(shape.widths[: level + 1]) for level in range(len(shape.widths)))
                size = 0 if min(shape.widths) < 1 else size
        except ValueError:
            size = 0
        if not 1 <= size <= MAX_NODES:
            raise UserError(
                f"--tree is {text!r}; use children per level as in 3,2,1, or dynamic:16 for the 16 likeliest nodes, "
                f"with 1 to {MAX_NODES} nodes in all."
            )
        return shape

    @property
    def depth(self) -> int | None:
        """Levels of a fixed shape; None when only the drafter limits them."""
        return len(self.widths) or None
