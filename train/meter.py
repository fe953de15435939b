"""What happened since the last report of training: sums, gradients, tokens, seconds, and the machine's share in use.

Knows: how a stretch of batches becomes metrics. Refuses to know: steps, ranks, and who reads the metrics.

Shapes: B batch, M anchors, K draft position, D hidden.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from mtp.objective import DraftSums
from train.loader import Batch


class Meter:
    """Counts batches until `restart`.

    Attributes:
        peak: operations per second of the machine; None measures no share of it.
        flops_per_token: operations of base and heads per token of a batch, forward and backward; None likewise.
    """

    def __init__(self) -> None:
        self.peak: float | None = None
        self.flops_per_token: float | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a new stretch."""
        self.sums: DraftSums | None = None
        self._slopes: Tensor | None = None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Take time anew, as after something that is not training."""
        self._tokens, self._since = 0.0, time.monotonic()

    def add(self, sums: DraftSums, batch: Batch) -> None:
        """Take in one batch and what came of it."""
        self.sums = sums if self.sums is None else self.sums + sums
        self._tokens += float(batch["attention_mask"].sum())

    def watch(self, hidden: Tensor) -> None:
        """Note the gradient that the heads' states [B,M,K,D] will get: whether every draft position is taught."""
        if hidden.requires_grad:
            hidden.register_hook(self._note)

    def _note(self, slope: Tensor) -> None:
        squared = slope.detach().double().square().sum((0, 1, 3))
        self._slopes = squared if self._slopes is None else self._slopes + squared

    def metrics(self, over_all: Callable[[Tensor], Tensor] = lambda own: own) -> dict[str, float]:
        """Tokens per second, the share of the peak, and per draft position the gradient's norm per supervised one.

        `over_all` sums a tensor over all processes: speeds add up, and the share is of all their machines."""
        speed = self._tokens / max(1e-9, time.monotonic() - self._since)
        used = self.flops_per_token * speed if self.peak is not None and self.flops_per_token is not None else 0.0
        total, used, peak = over_all(torch.tensor([speed, used, self.peak or 0.0], dtype=torch.double)).tolist()
        found = {"train/tokens_per_s": total}
        if used:
            found["train/peak_share"] = used / peak
        if self._slopes is not None and self.sums is not None:
            positions = over_all(self.sums.positions).clamp(min=1)
            norms = (over_all(self._slopes).sqrt() / float(positions)).tolist()
            found |= {f"train/grad_norm/{k}": norm for k, norm in enumerate(norms, 1)}
        return found
