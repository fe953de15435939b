"""One forward over a tree of tokens: each sees what is cached, its ancestors and itself, at the place of its depth.

Knows: the four-dimensional mask and positions that transformers' attention takes for that, and how to check on a few
tokens that a base heeds them. Refuses to know: acceptance rules, drafts.

Shapes: R rows of the tree, T_past cached positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtp.errors import UserError


@dataclass(frozen=True)
class TreeMask:
    """visible [R, R] bool: row r sees row s; depths [R]: places of the rows behind the first of them."""

    visible: Tensor
    depths: Tensor

    def arguments(self, past: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """The mask [1, 1, R, T_past + R], added to the scores, and the positions [1, R]."""
        rows = len(self.depths)
        seen = torch.cat([self.visible.new_ones(rows, past), self.visible], dim=1)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        mask.masked_fill_(~seen, torch.finfo(dtype).min)
        return {"attention_mask": mask[None, None], "position_ids": (past + self.depths)[None]}


# What attention that takes no such mask raises.
_REFUSALS = (ValueError, TypeError, RuntimeError, IndexError, KeyError, AttributeError, AssertionError, UserError)


@torch.no_grad()
def tree_fault(base: Any) -> str | None:
    """Why a base cannot run over trees, or None. It is run over one, and over the tree's two paths in turn.

    Row 0 has the children 1 and 2, row 2 the child 3: a base that ignores the mask or the positions shows it.
    """
    cache = base.new_cache()
    local = "local" in (getattr(base.model.config, "attention_layers", None) or ())  # GPT-Neo: a window of rows
    if cache.slides or local:
        return "some of its layers see a sliding window only"
    if not base.takes_positions:
        return "it takes no positions"
    device = base.device
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool, device=device)
    tree = TreeMask(visible, torch.tensor([0, 1, 1, 2], device=device))
    prompt = torch.tensor([[0, 1]], device=device)
    tokens = torch.tensor([[2, 3, 4, 1]], device=device)
    try:
        base.forward(prompt, cache=cache)
        hidden = base.forward(tokens, cache=cache, tree=tree).hidden[0]
    except _REFUSALS as error:
        return f"its attention takes no mask of a tree ({type(error).__name__})"
    return None if _agrees(base.forward, prompt, tokens, hidden) else "its attention does not follow the mask of a tree"


def _agrees(forward: Callable[[Tensor], Any], prompt: Tensor, tokens: Tensor, hidden: Tensor) -> bool:
    """Whether states [R, D] of the tree equal those of its two paths, each read as a text."""
    for rows in ([0, 1], [0, 2, 3]):
        text = torch.cat([prompt, tokens[:, rows]], dim=1)
        expected = forward(text).hidden[0, prompt.shape[1] :]
        tolerance = 1e-4 if hidden.dtype.itemsize >= 4 else 32 * torch.finfo(hidden.dtype).eps
        if not bool((hidden[rows] - expected).abs().max() <= tolerance * expected.abs().max()):
            return False
    return True
