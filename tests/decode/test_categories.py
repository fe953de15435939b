"""Acceptance length by category of prompt: read from the file, counted apart, averaged over categories."""

import json
from pathlib import Path

import pytest

from decode.prompts import read_categorised, read_prompts
from decode.sides import Side, Trial
from decode.stats import DecodeStats
from mtp.errors import UserError

LINES = [
    {"prompt": "one", "category": "a"},
    {"turns": ["two", "more"], "category": "b"},
    {"prompt": "three", "category": "a"},
    {"prompt": "four"},
]


def written(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_prompts_come_with_their_categories(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_categorised(path) == [("one", "a"), ("two", "b"), ("three", "a"), ("four", None)]
    assert read_categorised(path, per_category=1) == [("one", "a"), ("two", "b"), ("four", None)]
    assert read_categorised(path, limit=1, per_category=1) == [("one", "a")]
    assert read_prompts(path) == ["one", "two", "three", "four"]


@pytest.mark.parametrize("option", ["limit", "per_category"])
def test_no_prompts_at_all_cannot_be_asked_for(option: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} is 0"):
        read_categorised(written(tmp_path), **{option: 0})


def text(steps: int, committed: int) -> DecodeStats:
    stats = DecodeStats("token", 2, None)
    stats.steps, stats.committed = steps, committed
    return stats


def test_the_mean_is_over_categories_and_not_over_texts() -> None:
    """Category a has two long texts, b one short one; each category counts once."""
    texts = iter([text(10, 20), text(30, 60), text(1, 1)])
    side = Side("mtp", lambda tasks: (5, [next(texts) for _ in tasks]))
    side.measure([Trial([1], 5, "a"), Trial([1], 5, "a")])
    side.measure([Trial([1], 5, "b")])
    report = side.to_json()
    assert report["accept_len_by_category"] == {"a": 2.0, "b": 1.0}
    assert report["accept_len_category_mean"] == pytest.approx(1.5)
    assert report["accept_len"] == pytest.approx(81 / 41)  # over all steps: another number
