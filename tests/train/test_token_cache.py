"""Tokens are read again only if everything they depend on is the same and the file is whole."""

import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mtp.errors import UserError
from tests.tiny import tiny_tokenizer
from train import token_cache
from train.records import Record, normalise
from train.token_cache import Encoded, cache_key, encode_cached

ANSWER = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "an ant."}]


def records(file: str = "d") -> list[Record]:
    rows = [{"messages": ANSWER}, {"text": "the ant " * 40}, {"messages": ANSWER[:1]}, {"text": "an inn"}]
    return [normalise(row, f"{file}:{i}") for i, row in enumerate(rows)]


def encode(folder: Path | None, rows: list[Record] | None = None, max_length: int = 40) -> Encoded:
    return encode_cached(rows or records(), tiny_tokenizer(), max_length=max_length, folder=folder)


def same(one: Encoded, other: Encoded) -> bool:
    pairs = zip(one[0], other[0], strict=True)
    equal = all(a.tokens.equal(b.tokens) and a.supervised.equal(b.supervised) and a.where == b.where for a, b in pairs)
    return equal and one[1].to_json() == other[1].to_json()


def test_what_is_read_is_what_was_kept(tmp_path: Path) -> None:
    plain, kept, read = encode(None), encode(tmp_path / "a" / "b"), encode(tmp_path / "a" / "b")
    assert plain[1].notes == []
    assert kept[1].notes[0].startswith("tokens kept in")
    assert read[1].notes[0].startswith("tokens read from cache")
    assert same(plain, kept)
    assert same(plain, read)
    assert read[1].first_dropped == plain[1].first_dropped != {}
    assert [p.name for p in (tmp_path / "a" / "b").glob("*.part")] == []


def test_a_file_that_moved_is_known_under_its_new_name(tmp_path: Path) -> None:
    encode(tmp_path)
    examples, report = encode(tmp_path, records("moved/d"))
    assert "read from cache" in report.notes[0]
    assert {example.where for example in examples} == {"moved/d:0", "moved/d:1", "moved/d:3"}
    assert list(report.first_dropped.values()) == ["moved/d:2"]


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(rows: list[Record] | None = None, max_length: int = 40, **changes: object) -> str:
        tokenizer = tiny_tokenizer()
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        return cache_key(rows or records(), tokenizer, max_length)

    other = tiny_tokenizer()
    other.backend_tokenizer.pre_tokenizer = None
    rows = records()
    keys = [
        key(),
        key(max_length=41),
        key(rows[:-1]),
        key(rows[::-1]),
        key([*rows[:-1], normalise({"text": "an in"}, "d:3")]),
        key([normalise({"messages": ANSWER, "finish_reason": "length"}, "d:0"), *rows[1:]]),
        key(chat_template="other"),
        cache_key(rows, other, 40),
    ]
    assert key() == keys[0]
    monkeypatch.setattr(token_cache, "ENCODING", 0)
    keys.append(key())
    assert len(set(keys)) == len(keys)


def rewrite(path: Path, *, header: dict[str, str] | None = None, lengths: list[int] | None = None) -> None:
    """The same file with something changed."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    if lengths is not None:
        tensors["lengths"] = torch.tensor(lengths)
        metadata["content"] = token_cache._content_hash(tensors)
    save_file(tensors, path, metadata=metadata | (header or {}))


@pytest.mark.parametrize("damage", ["empty", "short", "byte", "header", "foreign", "lengths", "report", "folder"])
def test_a_damaged_file_is_made_anew(tmp_path: Path, damage: str) -> None:
    expected = encode(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    data = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "short":
        path.write_bytes(data[:-20])
    elif damage == "byte":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "header":
        path.write_bytes(data[:20] + b"?" + data[21:])
    elif damage == "foreign":
        rewrite(path, header={"key": "0" * 64})
    elif damage == "lengths":
        rewrite(path, lengths=[1])
    elif damage == "report":
        rewrite(path, header={"report": '{"dropped": 3}'})
    else:
        path.unlink()
        path.mkdir()
    found = encode(tmp_path)
    assert same(found, expected)
    assert "were damaged" in found[1].notes[0]
    if damage != "folder":  # which nothing but a person can take away
        assert "read from cache" in encode(tmp_path)[1].notes[0]


def test_a_folder_that_cannot_be_used_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    examples, report = encode(tmp_path / "file" / "tokens")
    assert examples
    assert "tokens not kept: data.cache_dir" in report.notes[0]


def test_failures_keep_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of 1 records"):
        encode(tmp_path, records()[2:3])
    assert list(tmp_path.glob("*.safetensors")) == []


def test_one_builds_and_the_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, found = [], []
    real = token_cache.encode_records

    def slow(*args: object, **kwargs: object) -> Encoded:
        built.append(1)
        time.sleep(0.3)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(token_cache, "encode_records", slow)
    threads = [threading.Thread(target=lambda: found.append(encode(tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert all(same(one, found[0]) for one in found)
