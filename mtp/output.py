"""From the last state to logits: the product with the output matrix, then the base's own factor and soft cap.

Knows: the config fields of the families that have one. Refuses to know: the model; `mtp.base` compares the result with
the model's own logits when it loads it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")  # Cohere; Falcon-H1
_DIVISORS = ("logits_scaling",)  # Granite
_CAPS = ("final_logit_softcapping",)  # Gemma-2 and later


_FEW_ROWS = 16


def project(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    """hidden [..., D] times matrix [V, D] transposed, plus bias [V]: [..., V].

    For two to sixteen rows in float32 on a CPU, `F.linear` is two to four times slower than the same product with the
    operands exchanged, because the large matrix is then read in its own order.
    """
    rows = hidden.numel() // hidden.shape[-1]
    if matrix.device.type != "cpu" or matrix.dtype != torch.float32 or not 1 < rows <= _FEW_ROWS:
        return F.linear(hidden, matrix, bias)
    product = (matrix @ hidden.reshape(rows, -1).T).T.contiguous().view(*hidden.shape[:-1], -1)
    return product if bias is None else product + bias


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
