"""The optimiser of a run: AdamW, or Muon for the matrices and AdamW for everything else.

Knows: which parameters go where, and how two optimisers look like one to Lightning and to a schedule.
Refuses to know: gradients, and which steps there are (`train.options` has the schedule).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mtp.sharding import spread_like, whole
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
    parts: list[Optimizer] = [Muon(matrices, lr=options.lr, weight_decay=decay)]
    return Joint(parts + ([AdamW(plain, lr=options.lr, betas=options.betas)] if plain else []))


QUINTIC = (3.4445, -4.7750, 2.0315)  # steep at zero: singular values come close to one, not to it, in few steps
MOMENTUM, STEPS = 0.95, 5


class Muon(Optimizer):
    """Momentum whose updates are orthogonalised: Jordan et al. 2024, kellerjordan.github.io/posts/muon.

    Updates as large as AdamW's, 0.2 sqrt(max(m, n)) for a matrix [m,n], make one learning rate fit both (Liu et al.,
    arXiv 2502.16982). `torch.optim.Muon` computes the same, in bfloat16 everywhere; on a CPU without products in it
    that takes five times as long and most of a training step, so here only a GPU does.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every matrix that has a gradient."""
        assert closure is None, "Joint runs the closure"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                update = spread_like(orthogonal(whole(matrix.grad.lerp(momentum, MOMENTUM))), matrix)
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)
        return None


def orthogonal(matrix: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to [m,n], by five steps of the quintic Newton-Schulz iteration."""
    a, b, c = QUINTIC
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide.bfloat16() if matrix.device.type == "cuda" else wide.float()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix.dtype)


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
