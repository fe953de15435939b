"""Forwards of transformers with few rows on the CPU, their products computed the fast way.

Knows: how to give every `nn.Linear` of a base the product of `mtp.output.project`, for the length of a `with` block.
Refuses to change anything but the order of summation: results differ by rounding only.

Shapes: B batch, T position.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtp.kernels import Kernels
from mtp.output import exchange_pays, project

MAX_ROWS = 16


class SkinnyProducts(TorchFunctionMode):
    """Inside `with SkinnyProducts():`, `F.linear` is `mtp.output.project`."""

    def __init__(self, kernels: Kernels | None = None) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and not kwargs:
            hidden, matrix, *bias = args
            return project(hidden, matrix, bias[0] if bias else None, self.kernels)
        return func(*args, **(kwargs or {}))


def fast_products(tokens: Tensor, kernels: Kernels | None = None) -> AbstractContextManager[object]:
    """The context for a forward over tokens [B, T]: `SkinnyProducts` where their number can profit, else nothing."""
    if tokens.device.type != "cpu":
        return nullcontext()
    if kernels is not None and tokens.numel() in kernels.rows:
        return SkinnyProducts(kernels)
    few = 2 <= tokens.numel() <= MAX_ROWS
    return SkinnyProducts(kernels) if few and exchange_pays(torch.get_num_threads()) else nullcontext()
