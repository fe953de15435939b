"""Which heads belong to which base.

Knows: what must fit for drafts to be drafts at all, and what hashes tell of the rest. Refuses to load either.
"""

import torch

from mtp.base import FrozenBase
from mtp.config import BaseRef
from mtp.errors import UserError
from mtp.heads import Heads

_WEIGHTS = "other weights"
OTHER_BASE = "the text follows exactly the base that is given, and fewer drafts are accepted"
"""What it means to decode with heads of another base."""


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
    difference = _difference(base, config.base)
    if difference is None:
        return None
    told = f"{_mismatch(base, heads, difference)}."
    if allow_other:
        return f"warning: {told.partition(';')[0]}; {OTHER_BASE}."
    if base.dtype == torch.float16 and difference == _WEIGHTS:
        raise UserError(
            f"--dtype is float16, which rounds the weights of --base {base.name} so that its identity cannot be "
            "told; use bfloat16 or float32."
        )
    raise UserError(f"{told} --allow-other-base (allow_other_base=True) decodes all the same: {OTHER_BASE}.")


def _difference(base: FrozenBase, trained: BaseRef) -> str | None:
    """In what the base differs from the one that heads were trained on, as far as hashes tell."""
    if trained.fingerprint and trained.fingerprint != base.fingerprint():
        return _WEIGHTS
    if (
        trained.tokenizer_fingerprint
        and base.tokenizer is not None
        and trained.tokenizer_fingerprint != base.tokenizer_fingerprint()
    ):
        return "another tokenizer or chat template"
    return None


def _mismatch(base: FrozenBase, heads: Heads, difference: str) -> str:
    return (
        f"--heads were trained for a base with {difference} than --base {base.name}; use the base they name "
        f"({heads.config.base.name}, revision {heads.config.base.revision or 'none'}), or train heads for this one"
    )
