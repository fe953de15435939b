"""Which heads belong to which base.

Knows: what must fit for drafts to be drafts at all, and what hashes tell of the rest. Refuses to load either.
"""

import torch

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.heads import Heads
from mtp.other_base import OTHER_BASE, WEIGHTS, difference


class AnotherBase(UserError):
    """The base has the sizes that heads need, and is not theirs. `fault` leaves out that one may decode all the same,
    for those who do not decode."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault} --allow-other-base (allow_other_base=True) decodes all the same: {OTHER_BASE}.")
        self.fault = fault


def check_pair(base: FrozenBase, heads: Heads, allow_other: bool = False) -> str | None:
    """UserError unless these heads were trained on this base: sizes, weights and tokenizer. With `allow_other` the last
    two may differ, and what that means is returned."""
    config = heads.config
    for what, trained, found in (
        ("vocabulary size", config.vocab_size, base.vocab_size),
        ("hidden size", config.hidden_size, base.hidden_size),
    ):
        if trained != found:
            raise UserError(f"{_mismatch(base, heads, f'{what} {trained} instead of {found}')}.")
    if max(config.feature_layers) > base.num_layers:
        more = f"more layers: they read layer {max(config.feature_layers)}, and it has {base.num_layers}"
        raise UserError(f"{_mismatch(base, heads, more)}.")
    found_difference = difference(base, config.base)
    if found_difference is None:
        return None
    told = f"{_mismatch(base, heads, found_difference)}."
    if allow_other:
        return f"warning: {told.partition(';')[0]}; {OTHER_BASE}."
    if base.dtype == torch.float16 and found_difference == WEIGHTS:
        raise UserError(
            f"--dtype is float16, which rounds the weights of --base {base.name} so that its identity cannot be "
            "told; use bfloat16 or float32."
        )
    raise AnotherBase(told)


def _mismatch(base: FrozenBase, heads: Heads, difference: str) -> str:
    return (
        f"--heads were trained for a base with {difference} than --base {base.name}; use the base they name "
        f"({heads.config.base.name}, revision {heads.config.base.revision or 'none'}), or train heads for this one"
    )
