"""From the last state to logits: the product with the output matrix, then the base's own factor and soft cap.

Knows: the config fields of the families that have one. Refuses to know: the model; `mtp.base` compares the result with
the model's own logits when it loads it.
"""

import time
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mtp.kernels import Kernels, plain

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon-H1
_DIVISORS = ("logits_scaling",)  # Granite
_CAPS = ("final_logit_softcapping",)  # Gemma-2 and later


_FEW_ROWS = 16
_TRIAL_MATRICES, _TRIAL_SHAPE, _TRIAL_ROWS, _TRIAL_ROUNDS = 12, (1536, 576), 4, 6


def project(hidden: Tensor, matrix: Tensor, bias: Tensor | None, kernels: Kernels | None = None) -> Tensor:
    """hidden [..., D] times matrix [V, D] transposed, plus bias [V]: [..., V].

    A few rows are computed by `kernels`, if given. Otherwise two to sixteen rows in float32 on a CPU are computed with
    the operands exchanged where that is faster: the large matrix is then read in its own order, which some CPUs reward
    two to four times over, and others punish.
    """
    if kernels is not None and kernels.take(hidden, matrix):
        product = kernels.product(hidden, matrix)
        return product if bias is None else product + bias
    rows = hidden.numel() // hidden.shape[-1]
    few = matrix.device.type == "cpu" and matrix.dtype == torch.float32 and 1 < rows <= _FEW_ROWS
    if not (few and plain(matrix) and exchange_pays(torch.get_num_threads())):
        return F.linear(hidden, matrix, bias)
    product = exchanged(hidden.reshape(rows, -1), matrix).view(*hidden.shape[:-1], -1)
    return product if bias is None else product + bias


def exchanged(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [n, D] times matrix [V, D] transposed, the large matrix first: [n, V]."""
    return (matrix @ rows.T).T.contiguous()


@cache
def exchange_pays(threads: int) -> bool:
    """Whether a few float32 rows are multiplied faster the other way round by this CPU with `threads` threads.

    Measured once, in some 50 ms: four rows against matrices that together do not fit a cache.
    """
    del threads  # the key of the cache
    matrices, rows = torch.zeros(_TRIAL_MATRICES, *_TRIAL_SHAPE), torch.zeros(_TRIAL_ROWS, _TRIAL_SHAPE[1])
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_TRIAL_ROUNDS):
        for swap, spent in times.items():
            started = time.perf_counter()
            for matrix in matrices:
                exchanged(rows, matrix) if swap else F.linear(rows, matrix)
            spent.append(time.perf_counter() - started)
    return min(times[True]) < min(times[False])


@dataclass(frozen=True, kw_only=True)
class OutputScale:
    """logits = cap · tanh(factor · x / cap), or factor · x when there is no cap."""

    factor: float = 1.0
    cap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> "OutputScale":
        factor = 1.0
        for field in _MULTIPLIERS:
            factor *= _number(config, field) or 1.0
        for field in _DIVISORS:
            factor /= _number(config, field) or 1.0
        cap = next((value for field in _CAPS if (value := _number(config, field))), None)
        return cls(factor=factor, cap=cap)

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply to logits [..., V]."""
        if self.factor != 1.0:
            logits = logits * self.factor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def _number(config: Any, field: str) -> float | None:
    value = getattr(config, field, None)
    return float(value) if isinstance(value, (int, float)) else None
