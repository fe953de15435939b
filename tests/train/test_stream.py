"""Streaming: a run sees exactly the records it would see uninterrupted, on any number of ranks, in bounded memory."""

import json
import os
import re
import signal
import time
import tracemalloc
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from mtp.errors import UserError
from tests.tiny import tiny_tokenizer
from tests.train.ranks import Ranks
from tests.train.runs import QUESTIONS, job, train
from tests.train.test_cli import final_state
from train.chat import Example
from train.cli import main
from train.data import ChatDataModule
from train.loader import ResumableLoader
from train.records import Record
from train.stream import RowStream, StreamLoader

PATIENCE = 600.0  # seconds for a process that takes a few where nothing else runs
STREAM: dict[str, Any] = {"data__streaming": True, "data__stream_buffer": 10, "data__stream_sample": 20}


def numbered(folder: Path, count: int, name: str = "a", first: int = 0) -> Path:
    """Records that say their number; a line in between is empty."""
    path = folder / f"{name}.jsonl"
    lines = [json.dumps({"text": str(first + i)}) + "\n" * (1 + i % 2) for i in range(count)]
    path.write_text("".join(lines))
    return path


def as_parquet(path: Path) -> Path:
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    datasets.Dataset.from_list(rows).to_parquet(path.with_suffix(".parquet"), batch_size=7)
    return path.with_suffix(".parquet")


def encode(records: list[Record]) -> list[Example]:
    """One example for each record, of its number and of a length that depends on it; every seventh has none."""
    numbers = [int(record.text) for record in records]
    return [
        Example(torch.full((3 + n % 9,), n, dtype=torch.int32), torch.ones(3 + n % 9, dtype=torch.bool), str(n))
        for n in numbers
        if n % 7 != 3
    ]


def loader(*paths: Path, shares: tuple[float, ...] = (1.0,), **changed: Any) -> StreamLoader:
    sources = [RowStream(str(path), "train", changed.pop("limit", None)) for path in paths]
    return StreamLoader(sources, shares, encode, **({"size": 16, "batch_size": 3, "seed": 5} | changed))


def seen(batches: Any) -> list[list[int]]:
    """The records of each batch, in order; with packing as many as a row has."""
    found = []
    for batch in batches:
        marks = batch.get("segments", batch["attention_mask"].long())
        begins = marks.diff(dim=1, prepend=torch.zeros(len(marks), 1).long()) > 0
        found.append(batch["tokens"][begins].tolist())
    return found


# ---- the loader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_a_pass_shows_every_record_once_and_in_another_order_than_the_file(kind: str, tmp_path: Path) -> None:
    path = numbered(tmp_path, 64)
    path = path if kind == "lines" else as_parquet(path)
    flat = [n for batch in seen(islice(loader(path), 60)) for n in batch]
    usable = [n for n in range(64) if n % 7 != 3]
    assert sorted(flat[: len(usable)]) == usable
    assert flat[: len(usable)] != usable
    assert sorted(flat[len(usable) : 2 * len(usable)]) == usable, "and the second pass likewise"
    assert flat[: len(usable)] != flat[len(usable) : 2 * len(usable)]
    assert seen(islice(loader(path), 60)) != seen(islice(loader(path, seed=6), 60))
    limited = {n for batch in seen(islice(loader(path, limit=20), 60)) for n in batch}
    assert limited == {n for n in range(20) if n % 7 != 3}


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 33])
@pytest.mark.parametrize("kind", ["lines", "parquet", "packed"])
def test_a_resumed_stream_goes_on_exactly(stop: int, kind: str, tmp_path: Path) -> None:
    path = numbered(tmp_path, 41)
    path = as_parquet(path) if kind == "parquet" else path
    more = {"row_length": 20} if kind == "packed" else {}
    straight = seen(islice(loader(path, **more), 50))
    first = loader(path, **more)
    for _ in islice(first, stop):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    second = loader(path, **more)
    second.load_state_dict(state)
    assert seen(islice(second, 50 - stop)) == straight[stop:]
    second.load_state_dict(state)  # one that is under way goes there as well
    assert seen(islice(second, 5)) == straight[stop : stop + 5]
    assert stop == 0 or seen(islice(loader(path, **more), 50 - stop)) != straight[stop:], "the control"


@pytest.mark.parametrize("stop", [0, 3, 8])
def test_ranks_share_the_batches_of_one(stop: int, tmp_path: Path) -> None:
    """Also of a stream that another number of ranks began."""
    path = numbered(tmp_path, 50)
    straight = seen(islice(loader(path), 48))
    begun = loader(path, rank=0, world_size=2)
    for _ in islice(begun, stop):
        pass
    for ranks in (1, 2, 3):
        shares = []
        for rank in range(ranks):
            resumed = loader(path, rank=rank, world_size=ranks)
            resumed.load_state_dict(begun.state_dict())
            shares.append(seen(islice(resumed, 5)))
        together = [batch for step in zip(*shares, strict=True) for batch in step]
        assert together == straight[2 * stop : 2 * stop + 5 * ranks]


def test_sources_come_in_their_shares(tmp_path: Path) -> None:
    paths = numbered(tmp_path, 30, "a"), numbered(tmp_path, 200, "b", first=1000)
    flat = [n for batch in seen(islice(loader(*paths, shares=(3.0, 1.0)), 200)) for n in batch]
    of_a = sum(n < 1000 for n in flat) / len(flat)
    assert of_a == pytest.approx(0.75, abs=0.02)
    counts = Counter(n for n in flat if n < 1000)
    assert max(counts.values()) - min(counts.values()) <= 1, "a small source goes round evenly"


def test_memory_holds_two_blocks_however_long_the_file(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for i in range(5000):
            file.write(json.dumps({"text": str(i), "more": "x" * 3000}) + "\n")
    assert path.stat().st_size > 15e6
    tracemalloc.start()
    count = sum(len(batch["tokens"]) for batch in islice(loader(path, size=128, batch_size=32), 130))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count > 3500
    assert peak < 2e6, "bytes; the file has seven times as many"


def test_another_stream_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path, 30)
    state = loader(path).state_dict()
    for changed in ({"batch_size": 4}, {"seed": 1}, {"identity": {"buffer": 7}}):
        with pytest.raises(UserError, match="stopped inside another stream"):
            loader(path, **changed).load_state_dict(state)
    with pytest.raises(UserError, match="without data.streaming"):
        loader(path).load_state_dict({"epoch": 0, "batch": 1})
    examples = encode([Record(kind="text", where="", text="1")])
    with pytest.raises(UserError, match="is of a run with data.streaming; resume with it true"):
        ResumableLoader(examples, 1).load_state_dict(state)
    path.write_text(path.read_text().replace('{"text": "1"}', "{", 1))
    with pytest.raises(UserError, match=r"a.jsonl:2: not JSON"):
        list(islice(loader(path), 3))
    (tmp_path / "none.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match="holds no records"):
        list(islice(loader(tmp_path / "none.jsonl"), 3))


def without(lines: list[str], number: int) -> list[str]:
    return lines[:number] + lines[number + 1 :]


@pytest.mark.parametrize("kind", ["lines", "parquet"])
@pytest.mark.parametrize("stop", [1, 5, 8, 33])
def test_a_stream_of_changed_records_is_refused(kind: str, stop: int, tmp_path: Path) -> None:
    """Above the place where it stopped, or in the block with it, whatever is missing, added or exchanged; 41 records
    in blocks of 16 with batches of 3. Below it, data may grow."""
    path = numbered(tmp_path, 41)
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.strip()]
    path.write_text("".join(lines))
    first = loader(path)
    for _ in islice(first, stop):
        pass
    state = first.state_dict()
    row = state["sources"][0]["row"]
    inside = row + 1 if state["batch"] else row - 1

    def resumed(lines: list[str]) -> None:
        path.write_text("".join(lines))
        source = path if kind == "lines" else as_parquet(path)
        second = loader(source)
        second.load_state_dict(state)
        next(iter(second))

    if kind == "parquet":
        other = loader(as_parquet(path))
        for _ in islice(other, stop):
            pass
        state = other.state_dict()
    for changed in (without(lines, inside), [lines[-1], *lines], list(reversed(lines))):
        if kind == "lines" or state["batch"]:
            with pytest.raises(UserError, match="stopped (after line|inside a block of other records)"):
                resumed(changed)
    resumed(lines)


# ---- the data module and the command line ----------------------------------------------------------------------------


def test_what_is_held_out_never_comes(tmp_path: Path) -> None:
    config = job(tmp_path)
    data = ChatDataModule(
        str(tmp_path / "data.jsonl"), val_size=8, batch_size=4, streaming=True, stream_buffer=10, stream_sample=20
    )
    data.set_tokenizer(tiny_tokenizer())
    data.setup()
    assert config.is_file()
    assert data.train_report.records == 12, "of 20 in the sample"
    assert len(data.val_examples) == 8
    decode = data.tokenizer.decode
    held = {decode(example.tokens) for example in data.val_examples}
    told = Counter(decode(row[mask]) for batch in islice(data.train_dataloader(), 40) for row, mask in rows(batch))
    assert len(told) == len(QUESTIONS) - 8
    assert not held & set(told)


def rows(batch: dict[str, torch.Tensor]) -> Any:
    return zip(batch["tokens"], batch["attention_mask"], strict=True)


def test_a_killed_run_on_a_stream_resumes_to_the_same_heads(ranks: Ranks, tmp_path: Path) -> None:
    """kill -9 in the middle of the second or a later pass through the data."""
    changes = STREAM | {"trainer__max_steps": 30, "model__decode__prompts": None, "trainer__val_check_interval": 10}
    expected = final_state(train(tmp_path, **changes))
    arguments = ["--config", str(job(tmp_path, run__name="killed", **changes))]
    checkpoint = tmp_path / "runs" / "killed" / "checkpoints" / "last.ckpt"
    (process,) = ranks.start(arguments, tmp_path / "said", count=1)
    deadline = time.monotonic() + PATIENCE
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(process, signal.SIGKILL)
    assert ranks.codes() == [-signal.SIGKILL], (tmp_path / "said").read_text()[-3000:]
    before = torch.load(checkpoint, weights_only=True)
    assert 3 <= before["global_step"] < 30, "the kill came too late to test anything"
    assert main([*arguments, "--ckpt_path", str(checkpoint)]) == 0
    resumed = final_state(checkpoint.parent.parent)
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__features": {"keep": True}}, "what is read once is not worth keeping"),
        ({"trainer__max_steps": -1}, "set trainer.max_steps"),
        ({"trainer__val_check_interval": None}, "give a number of batches"),
        ({"trainer__val_check_interval": 0.5}, "`val_check_interval` should be an integer"),
        ({"data__stream_buffer": 0}, "data.stream_buffer is 0; allowed is 1 or more"),
    ],
)
def test_what_cannot_be_streamed_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(job(tmp_path, **(STREAM | changes)))]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that stopped after two steps of a stream."""
    folder = tmp_path_factory.mktemp("begun")
    train(folder, **(SHORT | {"trainer__max_steps": 2}))
    return folder


SHORT: dict[str, Any] = STREAM | {
    "model__decode__prompts": None,
    "trainer__max_steps": 4,
    "trainer__val_check_interval": 100,
    "run__checkpoint_every": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__streaming": False}, "is of a run with data.streaming; resume with it true"),
        ({"data__val_size": 4}, "val_size was 8 and is 4"),
        ({"data__stream_sample": 30}, "stream_sample was 20 and is 30"),
        ({"line": 0}, "stopped (inside another stream: held_out was|inside a block of other records|after line)"),
        ({"line": 15}, "stopped (inside another stream: held_out was|inside a block of other records|after line)"),
    ],
)
def test_a_stream_goes_on_only_with_what_it_was(
    changes: dict[str, Any], message: str, begun: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else other records would be held out, or come, and nobody would know."""
    line, data = changes.pop("line", None), begun / "data.jsonl"
    config = job(begun, **(SHORT | changes))  # which writes the data anew
    if line is not None:
        data.write_text("".join(without(data.read_text().splitlines(keepends=True), line)))
    checkpoint = begun / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    assert main(["--config", str(config), "--ckpt_path", str(checkpoint)]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_a_run_without_streaming_does_not_go_on_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, **(SHORT | {"data__streaming": False, "trainer__max_steps": 2}))
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    assert main(["--config", str(job(tmp_path, **SHORT)), "--ckpt_path", checkpoint]) == 2
    assert "is of a run without data.streaming; resume with it false" in capsys.readouterr().err


@pytest.mark.parametrize("bad", ["{", pytest.param('{"messages": 5}', marks=pytest.mark.slow)])
def test_a_bad_record_says_how_the_stream_goes_on_without_it(
    bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(job(tmp_path, **(SHORT | {"trainer__max_steps": 20})))
    data = tmp_path / "data.jsonl"
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:33], bad, *lines[33:]]) + "\n")
    assert main(["--config", config]) == 2
    error = capsys.readouterr().err
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    assert f"{data}:34: " in error
    assert "Leave the records before it as they are; nothing before step " in error
    assert f"the same command with --ckpt_path {checkpoint} goes on" in error
    data.write_text("\n".join(lines) + "\n")
    assert main(["--config", config, "--ckpt_path", str(checkpoint)]) == 0
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 20


def test_a_stream_has_no_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--config", str(job(tmp_path, **STREAM))]) == 2
    assert "--data.streaming false --data.limit 20" in capsys.readouterr().err
