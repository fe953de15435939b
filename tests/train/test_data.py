"""The data module: from files to batches, the split into training and validation, counts, and options out of range."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtp.errors import UserError
from tests.tiny import tiny_tokenizer
from train.data import ChatDataModule, split_records
from train.records import Record


def text(content: str, where: str = "d:1") -> Record:
    return Record(kind="text", where=where, text=content)


def test_the_split_is_by_prompt_and_independent_of_order() -> None:
    records = [text(f"number {i % 30}", f"d:{i}") for i in range(90)]
    train, val = split_records(records, 10)
    assert {r.prompt_key for r in train}.isdisjoint(r.prompt_key for r in val)
    assert len(train) + len(val) == 90
    assert len(val) == 12  # whole prompts of three records
    _, again = split_records(records[::-1], 10)
    assert {r.prompt_key for r in again} == {r.prompt_key for r in val}
    assert split_records(records, 0) == (records, [])


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def module(*args: Any, **kwargs: Any) -> ChatDataModule:
    data = ChatDataModule(*args, **kwargs)
    data.set_tokenizer(tiny_tokenizer())
    return data


ROWS = [{"prompt": f"what is {i}?", "response": f"an ant or {i}."} for i in range(20)]


def test_from_files_to_batches(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", ROWS[:12]), write(tmp_path / "b.jsonl", ROWS[12:])]
    data = module(paths, val_size=4, batch_size=3, max_length=64)
    data.setup("fit")
    assert (len(data.train_examples), len(data.val_examples)) == (16, 4)
    assert (data.train_report.kept, data.val_report.kept) == (16, 4)
    batches = list(data.train_dataloader())
    assert [len(b["tokens"]) for b in batches].count(3) == 5
    assert sum(len(b["tokens"]) for b in data.val_dataloader()) == 4
    assert len(next(iter(data.val_dataloader()))["tokens"]) == 3
    assert "⟦an ant or" in data.preview()[0]
    encoded = data.train_examples
    data.setup("fit")
    assert data.train_examples is encoded


def test_options_take_effect(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    few = module(path, limit=7, val_size=2, max_length=30, val_batch_size=1)
    few.setup()
    assert len(few.train_examples) + len(few.val_examples) == 7
    assert max(map(len, few.train_examples)) == 30
    assert len(next(iter(few.val_dataloader()))["tokens"]) == 1
    orders = []
    for seed in (0, 1):
        data = module(path, val_size=0, seed=seed, batch_size=1)
        data.setup()
        assert data.val_dataloader() == []
        assert data.val_report is None
        orders.append([b["tokens"].tolist() for b in data.train_dataloader()])
    assert orders[0] != orders[1]


def test_validation_files_take_their_prompts_out_of_training(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", ROWS)
    val = write(tmp_path / "b.jsonl", [{"prompt": "What is  3?", "response": "other."}])
    data = module(train, val=val, val_size=5)
    data.setup()
    assert (len(data.train_examples), len(data.val_examples), data.num_shared) == (19, 1, 1)


def test_supervised_counts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    data = module(write(tmp_path / "a.jsonl", ROWS), val_size=0)
    data.setup()
    counts = data.supervised_counts(64)
    assert counts.shape == (64,)
    assert int(counts.sum()) == data.train_report.supervised_tokens
    assert int(counts[tokenizer.eos_token_id]) == 20
    assert int(counts[tokenizer.convert_tokens_to_ids("?")]) == 0
    with pytest.raises(UserError, match="the base has a vocabulary of 10"):
        data.supervised_counts(10)


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"val_batch_size": 0}, {"max_length": 1}, {"val_size": -1}, {"limit": 0}]
)
def test_options_out_of_range(wrong: dict[str, int]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"data.{name} is {value}; allowed is \d or more"):
        ChatDataModule("a.jsonl", **wrong)


def test_validation_must_leave_something_for_training(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(UserError, match="data.val_size is 20, which takes every training record"):
        module(path, val_size=20).setup()
    with pytest.raises(UserError, match="data.val takes every training record"):
        module(path, val=path).setup()
