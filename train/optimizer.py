"""The optimiser of a run: AdamW, or Muon for the matrices and AdamW for everything else.

Knows: which parameters go where, and how two optimisers look like one to Lightning and to a schedule.
Refuses to know: gradients, and which steps there are (`train.options` has the schedule).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from train.options import OptimizerOptions


def make_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerOptions) -> Optimizer:
    """Weight decay is for matrices only: norms and biases have no scale to lose."""
    parameters = list(parameters)
    matrices, vectors = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    decay = options.weight_decay
    plain = [{"params": vectors, "weight_decay": 0.0}] if vectors else []
    if options.kind == "adamw" or not matrices:
        groups = [{"params": matrices, "weight_decay": decay}] if matrices else []
        return AdamW([*groups, *plain], lr=options.lr, betas=options.betas)
    # Updates as large as AdamW's make one learning rate fit both (Liu et al., arXiv 2502.16982).
    parts: list[Optimizer] = [Muon(matrices, lr=options.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")]
    return Joint(parts + ([AdamW(plain, lr=options.lr, betas=options.betas)] if plain else []))


class Joint(Optimizer):
    """Several optimisers that step together. Their groups are shared, so a schedule that sets `lr` reaches them."""

    def __init__(self, parts: list[Optimizer]) -> None:
        self.parts = parts
        super().__init__([{"params": group["params"]} for part in parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each; the closure runs once, before the first."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        for part in self.parts:
            part.step()
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share()
