"""Weight-only quantisation of a base that is already loaded, by torchao.

Knows: which kinds are offered and what must be installed. Refuses to know: how weights are rounded, and heads. The
quantised model is p from then on: text follows it exactly, and no longer the model that it was made of.
"""

from mtp.base import FrozenBase
from mtp.errors import UserError

KINDS = ("int8",)


def check_quantise(kind: str | None) -> None:
    """UserError for another kind, and where torchao is missing."""
    if kind is None:
        return
    if kind not in KINDS:
        raise UserError(f"--quantise is {kind!r}; allowed is {', '.join(KINDS)}, or leave it out.")
    try:
        from torchao.quantization import quantize_  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--quantise {kind} needs torchao, which cannot be imported ({error}); "
            "install it (pip install torchao), or leave --quantise out."
        ) from None


def quantise(base: FrozenBase, kind: str) -> None:
    """Hold the matrices of the decoder layers as 8-bit integers with one factor per row, in place; embedding and output
    matrix stay as they are, so heads that are bound to them stay bound. UserError as `check_quantise`."""
    check_quantise(kind)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    base.mark_quantised(kind)
    quantize_(base.layers, Int8WeightOnlyConfig())
