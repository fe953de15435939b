"""Weight-only quantisation of a base that is already loaded, by torchao.

Knows: which kinds are offered and what must be installed. Refuses to know: how weights are rounded, and heads. The
quantised model is p from then on: text follows it exactly, and no longer the model that it was made of.
"""

from typing import Any

import torch

from mtp.base import FrozenBase
from mtp.errors import UserError

KINDS = ("int8", "int4")
GROUP = 32  # weights of a row that share a factor in int4; every usual width is a multiple


def check_quantise(kind: str | None, option: str = "--quantise") -> None:
    """UserError, which names the option, for another kind, and where torchao is missing."""
    if kind is None:
        return
    if kind not in KINDS:
        raise UserError(f"{option} is {kind!r}; allowed is {', '.join(KINDS)}, or leave it out.")
    try:
        from torchao.quantization import quantize_  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{option} {kind} needs torchao, which cannot be imported ({error}); "
            f"install it (pip install torchao), or leave {option} out."
        ) from None


def quantise(base: FrozenBase, kind: str, option: str = "--quantise") -> None:
    """Hold the matrices of the decoder layers as integers, in place: `int8` with one factor per row, `int4` with one
    and an offset per 32 weights. Embedding and output matrix stay as they are, so heads that are bound to them stay
    bound. UserError as `check_quantise`, and for `int4` elsewhere than in bfloat16 on a GPU, where torchao has it."""
    check_quantise(kind, option)
    from torchao.quantization import quantize_

    if kind == "int4" and (base.device.type != "cuda" or base.dtype != torch.bfloat16):
        raise UserError(
            f"{option} is int4, which needs bfloat16 and a CUDA device, and base {base.name!r} is in {base.dtype} on "
            f"{base.device}; use int8, or leave {option} out."
        )
    base.mark_quantised(kind)
    quantize_(base.layers, _config(kind))


def _config(kind: str) -> Any:
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return Int8WeightOnlyConfig()
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(
        group_size=GROUP, int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq"
    )
