"""The draft vocabulary: which tokens the heads can propose.

Knows: how to choose it from counts of supervised tokens, and how to name it by a hash, so that weights and vocabulary
can never be mixed up. The output stays exact whatever is left out: q is 0 there.
Refuses to know: where counts come from.
"""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from mtp.errors import UserError


def build_draft_vocab(counts: Tensor, size: int, keep: Iterable[int] = ()) -> Tensor:
    """The ids [size] of the most frequent tokens in counts [V], ascending, always with those in `keep`.

    Ties, and room beyond the tokens seen, go to the lower id, so that the choice is a function of the counts alone.
    """
    kept = sorted(set(keep))
    if not len(kept) <= size <= len(counts):
        raise UserError(
            f"heads.draft_vocab_size is {size}; it must hold the {len(kept)} special tokens that are always kept and "
            f"not exceed the base's vocabulary of {len(counts)}."
        )
    ranked = counts.clone().double()
    ranked[torch.tensor(kept, dtype=torch.long)] = float("inf")
    order = torch.argsort(ranked, descending=True, stable=True)
    return order[:size].sort().values


def vocab_hash(ids: Tensor) -> str:
    """SHA-256 of the ids as little-endian 64-bit integers."""
    return hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def coverage(counts: Tensor, ids: Tensor | None) -> float:
    """Share of the supervised tokens in counts [V] that the draft vocabulary can propose, 0…1."""
    total = float(counts.sum())
    return 1.0 if ids is None or not total else float(counts[ids].sum()) / total


def unseen(counts: Tensor, ids: Tensor) -> float:
    """Share of the draft vocabulary that counts [V] hold no sample of, 0…1: rows that were only filled up by id."""
    return float((counts[ids] == 0).sum()) / len(ids)
