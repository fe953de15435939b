"""The prompts that ship with the project: well formed, varied, and nothing held out resembles what is trained on."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from decode.prompts import read_prompts

FOLDER = Path(__file__).parents[2] / "configs" / "prompts"
TRAIN, HELD_OUT = FOLDER / "demo_train.jsonl", FOLDER / "demo_heldout.jsonl"


def texts(path: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]


def trigrams(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(words, words[1:], words[2:], strict=False))


@pytest.mark.parametrize(("path", "count"), [(TRAIN, 240), (HELD_OUT, 40)])
def test_files_are_well_formed_and_varied(path: Path, count: int) -> None:
    assert len(read_prompts(path)) == count
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert all(set(row) == {"prompt", "category"} for row in rows)
    assert len({row["prompt"].lower() for row in rows}) == count
    categories = Counter(row["category"] for row in rows)
    assert len(categories) == 12
    assert max(categories.values()) - min(categories.values()) <= 1
    assert len({row["category"] for row in rows[:12]}) == 12  # so that the first few are of all kinds
    assert all(5 <= len(row["prompt"].split()) <= 60 for row in rows)


def test_held_out_prompts_are_on_other_subjects() -> None:
    """No two prompts of the two files share more than half of their three-word sequences."""
    for held in texts(HELD_OUT):
        for trained in texts(TRAIN):
            a, b = trigrams(held), trigrams(trained)
            assert len(a & b) <= min(len(a), len(b)) / 2, (held, trained)
