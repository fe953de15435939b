"""Linear maps and norms that compute a few rows with the kernels of `mtp.kernels`, where they were given some.

Knows: how a module of modules gets them. Refuses to know: whether they pay, and blocks.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from mtp.kernels import Kernels, Mark, compact, mark
from mtp.output import project


class UsesKernels:
    """What `use_kernels` looks for. Without kernels everything is torch's."""

    kernels: Kernels | None = None


class Linear(UsesKernels, nn.Linear):
    """[..., inputs] to [..., outputs]."""

    compacting = False
    _compacted: tuple[Mark, Tensor | None] | None = None

    @property
    def compacted(self) -> Tensor | None:
        """The weights as kernels are to read them; None is as they are. Made anew when they have changed."""
        if not self.compacting:
            return None
        if self._compacted is None or self._compacted[0] != mark(self.weight):
            self._compacted = mark(self.weight), compact(self.weight)
        return self._compacted[1]

    def forward(self, input: Tensor) -> Tensor:
        if self.kernels is None:
            return F.linear(input, self.weight, self.bias)
        compacted = self.compacted
        if compacted is not None and self.kernels.take(input, compacted):
            return project(input, compacted, self.bias, self.kernels)
        return project(input, self.weight, self.bias, self.kernels)


class RMSNorm(UsesKernels, nn.RMSNorm):
    """[..., D], `eps` given."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        if self.kernels is not None and self.kernels.take_norm(x, self.weight):
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


def use_kernels(module: nn.Module, kernels: Kernels | None, compacted: bool = False) -> None:
    """Have every part of the module that can compute a few rows with `kernels`; None is torch again.

    compacted: matrices whose numbers allow it are held in bfloat16 besides, for the kernels.
    """
    for part in module.modules():
        if isinstance(part, UsesKernels):
            part.kernels = kernels
        if isinstance(part, Linear):
            part.compacting = kernels is not None and compacted
            part._compacted = None
