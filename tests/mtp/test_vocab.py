"""The draft vocabulary is a function of the counts, keeps what must stay, and is named by its hash."""

import pytest
import torch

from mtp.errors import UserError
from mtp.vocab import build_draft_vocab, coverage, unseen, vocab_hash

COUNTS = torch.tensor([0, 5, 9, 0, 7, 7, 1, 0])


def test_most_frequent_and_kept() -> None:
    assert build_draft_vocab(COUNTS, 3).tolist() == [2, 4, 5]
    assert build_draft_vocab(COUNTS, 3, keep=[7]).tolist() == [2, 4, 7]


def test_room_beyond_the_tokens_seen_goes_to_low_ids() -> None:
    assert build_draft_vocab(COUNTS, 7).tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_coverage() -> None:
    assert coverage(COUNTS, torch.tensor([2, 4])) == pytest.approx(16 / 29)
    assert coverage(COUNTS, None) == 1.0
    assert coverage(torch.zeros(4, dtype=torch.long), torch.tensor([1])) == 1.0


def test_weighted_counts_and_rows_never_seen() -> None:
    weighted = COUNTS.double() * 0.25
    assert build_draft_vocab(weighted, 3).tolist() == [2, 4, 5]
    assert coverage(weighted, torch.tensor([2, 4])) == pytest.approx(16 / 29)
    assert unseen(COUNTS, torch.tensor([0, 1, 2, 7])) == 0.5
    assert unseen(weighted, torch.tensor([2, 6])) == 0.0


def test_hash_names_the_ids_and_their_order() -> None:
    ids = torch.tensor([1, 2, 300])
    assert vocab_hash(ids) == vocab_hash(ids.int()) != vocab_hash(ids.flip(0))


@pytest.mark.parametrize(("size", "keep"), [(9, []), (1, [0, 1])])
def test_impossible_sizes_are_named(size: int, keep: list[int]) -> None:
    with pytest.raises(UserError, match="heads.draft_vocab_size"):
        build_draft_vocab(COUNTS, size, keep)
