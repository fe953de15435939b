"""Several texts in one row: each sees itself only, and counts its places from 0.

Knows: the places of the tokens of a packed row, and how to check on a few tokens that a base keeps the texts apart.
transformers itself starts a new text wherever the places stop rising by one, for every attention it has (also sliding
windows), as long as it gets no mask and no cache; so places are all a base is given.
Refuses to know: who packs, and what the texts are.

Shapes: B batch, T position. `segments` [B, T] long: 0 is padding, 1, 2, … are the texts of a row, in order.
"""

from typing import Any

import torch
from torch import Tensor

# What attention that takes no places, or none that start again, raises.
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError)


def segment_positions(segments: Tensor) -> Tensor:
    """Distance [B, T] of each position from the first of its run of equal numbers in segments [B, T]."""
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def packed_positions(segments: Tensor) -> Tensor:
    """The place [B, T] of each token in its own text; padding is at 0, which makes each of its tokens a text alone."""
    return torch.where(segments > 0, segment_positions(segments), 0)


@torch.no_grad()
def packing_fault(base: Any) -> str | None:
    """Why a base cannot run on packed rows, or None. A row of three texts and padding is compared with each alone."""
    if not base.takes_positions:
        return "it takes no positions"
    segments = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3, 0]], device=base.device)
    tokens = torch.tensor([[0, 1, 2, 3, 4, 3, 1, 2, 0]], device=base.device)
    try:
        hidden = base.forward_at(tokens, packed_positions(segments))
    except _REFUSALS as error:
        return f"its attention takes no places that start again ({type(error).__name__})"
    if not bool(hidden.isfinite().all()):
        return "padding gives it states that are not finite"
    tolerance = 1e-4 if hidden.dtype.itemsize >= 4 else 32 * torch.finfo(hidden.dtype).eps
    for segment in (1, 2, 3):
        own = segments[0] == segment
        expected = base.forward(tokens[:, own]).hidden[0]
        if not bool((hidden[0, own] - expected).abs().max() <= tolerance * expected.abs().max()):
            return "a text of a packed row gets other states than alone"
    return None
