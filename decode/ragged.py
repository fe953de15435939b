"""Attention of one token per text over texts of different lengths, without reading what only the longest holds.

Knows: how to split `scaled_dot_product_attention` of a batch whose texts are aligned at their ends into groups of
neighbouring rows, each over the columns of its own longest text, for the length of a `with` block.
Refuses to change anything but rounding: the columns left out are masked, and have weight 0.

Shapes: R rows, T columns; queries [R, heads, Q, head size] with Q = 1 or the queries that share a key, keys and values
[R, heads, T, head size], mask [R, 1 or heads, 1 or Q, T].
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

GROUP = 16  # rows: fewer read less, and more of them cost more calls
WORTH = 0.9  # of the columns still read, or less, and splitting pays for its calls


class RaggedAttention(TorchFunctionMode):
    """Inside `with RaggedAttention(lengths, width):`, a batch of that many rows and columns is attended in groups.

    lengths: of each row, the new column included; width: of the longest.
    """

    def __init__(self, lengths: Sequence[int], width: int) -> None:
        super().__init__()
        self.rows, self.width = len(lengths), width
        self.groups = [
            (start, min(start + GROUP, self.rows), max(lengths[start : start + GROUP]))
            for start in range(0, self.rows, GROUP)
        ]
        read = sum((end - start) * columns for start, end, columns in self.groups)
        self.worthwhile = read <= WORTH * self.rows * width

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention and len(args) == 3 and self._fits(args[1], named.get("attn_mask")):
            query, key, value = args
            mask = named.pop("attn_mask")
            parts = [
                func(
                    query[start:end],
                    key[start:end, :, -columns:],
                    value[start:end, :, -columns:],
                    attn_mask=mask[start:end, ..., -columns:],
                    **named,
                )
                for start, end, columns in self.groups
            ]
            return torch.cat(parts)
        return func(*args, **named)

    def _fits(self, key: Tensor, mask: Tensor | None) -> bool:
        known = (self.rows, self.width)
        return mask is not None and (key.shape[0], key.shape[2]) == known == (mask.shape[0], mask.shape[-1])
