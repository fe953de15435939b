"""Linear maps and norms that compute a few rows with the kernels of `mtp.kernels`, where they were given some.

Knows: how a module of modules gets them. Refuses to know: whether they pay, and blocks.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from mtp.kernels import Kernels, compact
from mtp.output import project


class UsesKernels:
    """What `use_kernels` looks for. Without kernels everything is torch's."""

    kernels: Kernels | None = None


class Linear(UsesKernels, nn.Linear):
    """[..., inputs] to [..., outputs]."""

    compacted: Tensor | None = None
    """The weights as kernels are to read them; None is as they are."""

    def forward(self, input: Tensor) -> Tensor:
        if self.kernels is None:
            return F.linear(input, self.weight, self.bias)
        if self.compacted is not None and self.kernels.take(input, self.compacted):
            return project(input, self.compacted, self.bias, self.kernels)
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

    compacted: matrices whose numbers allow it are held in bfloat16 besides, for the kernels. They must not change.
    """
    for part in module.modules():
        if isinstance(part, UsesKernels):
            part.kernels = kernels
        if isinstance(part, Linear):
            part.compacted = compact(part.weight) if kernels is not None and compacted else None
