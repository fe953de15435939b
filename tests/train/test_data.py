"""The data module: from files to batches, the split into training and validation, counts, and options out of range."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtp.errors import UserError
from tests.tiny import tiny_tokenizer
from train.data import ChatDataModule
from train.records import Record
from train.sources import held_out, parse_mixture, without_prompts


def text(content: str, where: str = "d:1") -> Record:
    return Record(kind="text", where=where, text=content)


def test_the_split_is_by_prompt_and_independent_of_order() -> None:
    records = [text(f"number {i % 30}", f"d:{i}") for i in range(90)]
    held = held_out(records, 10)
    assert held == held_out(records[::-1], 10)
    train = without_prompts(records, held)
    assert {r.prompt_key for r in train}.isdisjoint(held)
    assert 90 - len(train) == 12  # whole prompts of three records
    assert held_out(records, 0) == set()


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
    assert (few.train_report.records, few.val_report.records) == (5, 2)
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


def test_a_mixture_is_seen_by_weight(tmp_path: Path) -> None:
    sources = {write(tmp_path / "a.jsonl", ROWS[:8]): 2.0, write(tmp_path / "b.jsonl", ROWS[8:]): 0.5}
    data = module(sources, val_size=0, batch_size=1, max_length=64)
    data.setup()
    assert [(s.weight, s.report.records) for s in data.sources] == [(2.0, 8), (0.5, 12)]
    assert data.train_report.records == 20
    loader = data.train_dataloader()
    first, second = ([b["tokens"][0].tolist() for b in loader] for _ in range(2))
    assert len(first) == len(second) == 8 * 2 + 12 // 2
    texts = [example.tokens.tolist() for example in data.train_examples]
    padded = [text + [0] * (-len(text) % 8) for text in texts]
    assert [first.count(text) for text in padded[:8]] == [2] * 8
    assert [(first + second).count(text) for text in padded[8:]] == [1] * 12
    even = module(list(sources), val_size=0, max_length=64)
    even.setup()
    assert even.train_examples[0].tokens.equal(data.train_examples[0].tokens)
    counts = data.supervised_counts(64)
    assert float(counts.sum()) == sum(s.weight * s.report.supervised_tokens for s in data.sources)
    assert int(counts[tiny_tokenizer().eos_token_id]) == 8 * 2 + 12 // 2


def test_packing_and_limit(tmp_path: Path) -> None:
    path, other = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS)
    data = module([path, other], val_size=4, max_length=128, batch_size=2, limit=12, packing=True)
    data.setup()
    assert [s.report.records for s in data.sources] == [10, 10]
    batches = list(data.train_dataloader())
    assert sum(int(b["segments"].max(dim=1).values.sum()) for b in batches) == 20
    assert max(b["tokens"].shape[1] for b in batches) <= 128
    assert all("segments" not in b for b in data.val_dataloader())
    assert all("segments" not in b for b in module_batches(path))


def module_batches(path: str) -> list[dict[str, Any]]:
    data = module(path, val_size=0)
    data.setup()
    return list(data.train_dataloader())


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"a.jsonl": -1.0}, "data.train gives a.jsonl the weight -1.0; allowed is a number above 0"),
        ({"a.jsonl": 0.0}, "the weight 0.0"),
        ({"a.jsonl": float("nan")}, "the weight nan"),
        ({"a.jsonl": float("inf")}, "the weight inf"),
        ({}, "data.train is empty"),
        ([], "data.train is empty"),
        ("", "data.train has the source ''"),
        (
            ["a.jsonl", "b", "a.jsonl"],
            r"names a.jsonl 2 times; name it once, with a weight: data.train: {a.jsonl: 2.0}",
        ),
        ('{"a.jsonl": "much"}', "allowed are one source, a list of them, or source: weight"),
    ],
)
def test_impossible_mixtures(value: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        ChatDataModule(value)
    with pytest.raises(UserError, match=r"data.val is empty"):
        parse_mixture([], "data.val")


def test_the_base_must_be_able_to_read_the_examples(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    data = module(path, val_size=0)
    data.set_tokenizer(tiny_tokenizer(), vocab_size=30)
    with pytest.raises(UserError, match=r"hold token \d+, and the base has a vocabulary of 30"):
        data.setup()
    data.set_tokenizer(tiny_tokenizer(), vocab_size=64, context_length=20)
    with pytest.raises(
        UserError, match=r"data.max_length is 512 and the longest example has \d+ tokens; the base reads 20"
    ):
        data.setup()


def test_tokens_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    first, second = (module(path, val_size=4, cache_dir=str(tmp_path / "tokens")) for _ in range(2))
    first.setup()
    second.setup()
    assert "tokens kept in" in first.train_report.summary()
    assert "tokens read from cache" in second.train_report.summary()
    assert first.train_dataloader().state_dict() == second.train_dataloader().state_dict()
    assert [e.where for e in first.val_examples] == [e.where for e in second.val_examples]


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
