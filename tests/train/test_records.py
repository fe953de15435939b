"""Every spelling of a record is read, and every malformed line is named by file and line."""

import json
from pathlib import Path

import pytest

from mtp.errors import UserError
from train.records import Record, normalise, read_messages, read_records

USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
SYSTEM = {"role": "system", "content": "Be brief."}


def write(path: Path, *lines: object) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "kind", "messages"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, "chat", [SYSTEM, USER, ANSWER]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}, ANSWER]},
            "chat",
            [USER, ANSWER],
        ),
        (
            {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
            "chat",
            [USER, ANSWER],
        ),
        ({"conversations": [USER, ANSWER]}, "chat", [USER, ANSWER]),
        ({"conversations": [USER, ANSWER], "system": "Be brief."}, "chat", [SYSTEM, USER, ANSWER]),
        ({"conversations": [SYSTEM, USER, ANSWER], "system": "Be brief."}, "chat", [SYSTEM, USER, ANSWER]),
        ({"conversations": [USER, ANSWER], "system": " "}, "chat", [USER, ANSWER]),
        ({"prompt": "Why?", "response": "Because."}, "completion", [USER, ANSWER]),
        ({"prompt": "Why?", "completion": "Because."}, "completion", [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, "chat", [SYSTEM, USER, ANSWER]),
        ({"instruction": "Why?", "output": "Because."}, "completion", [USER, ANSWER]),
        ({"instruction": "Why?", "input": "", "output": "Because."}, "completion", [USER, ANSWER]),
        (
            {"instruction": "Sum", "input": "1 2", "output": "3"},
            "completion",
            [{"role": "user", "content": "Sum\n\n1 2"}, {"role": "assistant", "content": "3"}],
        ),
        ({"messages": None, "prompt": "Why?", "response": "Because.", "text": None}, "completion", [USER, ANSWER]),
        ({"text": "A line."}, "text", []),
    ],
)
def test_every_shape(row: dict, kind: str, messages: list) -> None:
    record = normalise(row, "here")
    assert (record.kind, list(record.messages)) == (kind, messages)
    assert record.text == (row["text"] if kind == "text" else "")


def test_messages_win_over_other_keys_and_extra_keys_are_ignored() -> None:
    record = normalise({"messages": [USER, ANSWER], "prompt": "no", "response": "no", "score": 3}, "here")
    assert record.messages == (USER, ANSWER)


def test_an_answer_cut_at_the_limit_is_not_finished() -> None:
    row = {"messages": [USER, ANSWER]}
    assert normalise(row, "here").finished
    assert normalise({**row, "finish_reason": "stop"}, "here").finished
    assert not normalise({**row, "finish_reason": "length"}, "here").finished


def test_jsonl_skips_empty_lines_keeps_order_and_stops_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", {"text": "one"}, "", "   ", {"text": "two"}, {"text": "three"})
    assert [r.text for r in read_records(path)] == ["one", "two", "three"]
    assert [r.where for r in read_records(path, limit=2)] == [f"{path}:1", f"{path}:4"]


def test_byte_order_mark_and_missing_last_newline_are_harmless(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}')
    assert [r.text for r in read_records(str(path))] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "one"', "not JSON"),
        (b"[1, 2]", "is a list"),
        (b'"text"', "is a text"),
        (b"null", "is missing"),
        (b'{"question": "Why?"}', r"\['question'\] are no known record"),
        (b"{}", "are no known record"),
        (b'{"prompt": "Why?"}', r"\['prompt'\] are no known record"),
        (b'{"text": 3}', "text is a number"),
        (b'{"prompt": "Why?", "response": ["a"]}', "response is a list"),
        (b'{"instruction": true, "output": "a"}', "instruction is a boolean"),
        (b'{"messages": []}', "an empty list"),
        (b'{"messages": "Why?"}', "the messages are a text"),
        (b'{"messages": ["Why?"]}', "message 1 is a text"),
        (b'{"messages": [{"role": "user"}]}', r"message 1 is an object with the keys \['role'\]"),
        (
            b'{"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]}',
            "message 2 has the role 'bot'",
        ),
        (b'{"messages": [{"role": 1, "content": "a"}]}', "has the role 1"),
        (b'{"messages": [{"role": "user", "content": null}]}', "missing as content"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "parts that are no text"),
        (b'{"conversations": [{"from": "human"}]}', "message 1 is an object"),
        (b'{"conversations": [{"from": "bing", "value": "a"}]}', "has the from 'bing'"),
        (b'{"text": "\xff"}', "byte 11 is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, complaint: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    with pytest.raises(UserError, match=complaint) as caught:
        read_records(str(path))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_records(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no records"):
        read_records(str(tmp_path / "empty.jsonl"))
    (tmp_path / "d.txt").write_text("x")
    with pytest.raises(UserError, match=r"ends in '.txt'; allowed are .jsonl"):
        read_records(str(tmp_path / "d.txt"))


def test_other_formats_come_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"messages": [USER, ANSWER], "text": None}, {"messages": None, "text": "plain"}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "d.parquet"))
    (tmp_path / "d.json").write_text(json.dumps([{"prompt": "Why?", "response": "Because."}]))
    records = read_records(str(tmp_path / "d.parquet"))
    assert [r.kind for r in records] == ["chat", "text"]
    assert records[0].messages == (USER, ANSWER)
    assert read_records(str(tmp_path / "d.json"))[0].messages == (USER, ANSWER)


def test_a_hub_id_with_subset_and_split_reaches_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str, subset: str | None, split: str, streaming: bool) -> list[dict]:
        asked.append((name, subset, split, streaming))
        return [{"text": "one"}, {"oops": 1}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_records("org/name:part", split="test", limit=1)[0].where == "org/name:part[test] row 0"
    with pytest.raises(UserError, match=r"org/name\[train\] row 1: keys \['oops'\]"):
        read_records("org/name", streaming=True)
    assert asked == [("org/name", "part", "test", False), ("org/name", None, "train", True)]


def test_a_source_that_cannot_be_loaded_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*_: object, **__: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        UserError, match=r"org/name \(split train\) cannot be loaded: ConnectionError: no route to host"
    ):
        read_records("org/name")


def test_prompt_key_ignores_case_blanks_system_and_answer() -> None:
    a = normalise({"messages": [SYSTEM, {"role": "user", "content": " why \n NOT?"}, ANSWER]}, "a")
    b = normalise({"prompt": "Why not?", "response": "Other."}, "b")
    assert a.prompt_key == b.prompt_key == "why not?"
    assert Record(kind="text", where="c", text="Why not?").prompt_key == "why not?"


def test_read_messages_refuses_nothing_but_lists() -> None:
    assert read_messages([USER], "here") == (USER,)
    with pytest.raises(UserError, match="here: the messages are an empty object"):
        read_messages({}, "here")
