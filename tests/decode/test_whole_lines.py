"""A file of whole lines: killed at any moment, continued, and refused where it was begun otherwise."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from decode.whole_lines import WholeLines, difference, fingerprint
from mtp.errors import UserError

SETTINGS = {"base": {"name": "a", "fingerprint": "1"}, "heads": None, "temperature": 0.5, "stop": ["x"]}


def records(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_lines_are_appended_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.jsonl"
    with WholeLines(path, SETTINGS, "--output") as file:
        file.append({"text": "é\u2028👩", "value": float("inf")})
    with WholeLines(path, SETTINGS, "--output") as file:
        file.append({"text": "half a pair: \ud83d"})
        assert [number for number, _ in file.records()] == [1, 2]
    assert records(path)[0] == {"text": "é\u2028👩", "value": "inf"}
    assert "é".encode() in path.read_bytes().splitlines()[0]
    assert json.loads((tmp_path / "new" / "out.jsonl.meta.json").read_text()) == SETTINGS


@pytest.mark.parametrize("torn", [b'{"half": ', b'{"whole": 1}', b"\xc3", b"x" * 200_000])
def test_half_a_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    with WholeLines(path, SETTINGS, "--output") as file:
        file.append({"n": 1})
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    with WholeLines(path, SETTINGS, "--output") as file:
        assert path.read_bytes() == whole
        file.append({"n": 2})
    assert records(path) == [{"n": 1}, {"n": 2}]


def test_a_kill_loses_no_line_that_was_told(tmp_path: Path) -> None:
    """The child tells of each line behind its `append`; what it told of is there, and the next run goes on."""
    path, (reader, writer) = tmp_path / "out.jsonl", os.pipe()
    child = os.fork()
    if child == 0:
        with WholeLines(path, SETTINGS, "--output") as file:
            for number in range(1_000_000):
                file.append({"n": number, "text": "x" * 5_000})
                os.write(writer, b".")
    os.close(writer)
    told = b""
    while len(told) < 20:
        told += os.read(reader, 20)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        told += more
    with WholeLines(path, SETTINGS, "--output") as file:
        there = [record["n"] for _, record in file.records()]
    assert there == list(range(len(there)))
    assert len(told) <= len(there) <= len(told) + 1


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    child = os.fork()
    if child == 0:
        with WholeLines(path, SETTINGS, "--output"):
            (tmp_path / "held").touch()
            time.sleep(60)
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with pytest.raises(UserError, match=r"--output .*out\.jsonl is being written by another process; wait for it"):
            WholeLines(path, SETTINGS, "--output")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    WholeLines(path, SETTINGS, "--output").__exit__(None, None, None)


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with WholeLines(path, SETTINGS, "--output") as file:
        file.append({"n": 1})
    told = "was begun with temperature 0.5, and now it is 1.0; use the same settings to continue it, or name a new file"
    with pytest.raises(UserError, match=told):
        WholeLines(path, SETTINGS | {"temperature": 1.0}, "--output")
    moved = SETTINGS | {"base": {"name": "elsewhere/a", "fingerprint": "1"}}
    assert fingerprint(moved) == fingerprint(SETTINGS)
    WholeLines(path, moved, "--output").__exit__(None, None, None)
    with pytest.raises(UserError, match=r"with base a \(1\), and now it is a \(2\)"):
        WholeLines(path, SETTINGS | {"base": {"name": "a", "fingerprint": "2"}}, "--output")
    (tmp_path / "out.jsonl.meta.json").unlink()
    with pytest.raises(UserError, match="is not beside it"):
        WholeLines(path, SETTINGS, "--output")


def test_what_json_makes_of_settings_is_no_difference() -> None:
    now = {"stop": ("x",), "n": 1, "none": None}
    assert difference(json.loads(json.dumps(now)), now) is None
    assert difference({"n": 1}, {"n": 1, "seed": 3}) == "seed nothing, and now it is 3"
    assert difference({"n": 1, "seed": 3}, {"n": 1}) == "seed 3, and now it is nothing"


def test_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with WholeLines(path, SETTINGS, "--output") as file:
        file.append({"n": 1})
    path.write_bytes(path.read_bytes() + b"[3]\n")
    with WholeLines(path, SETTINGS, "--output") as file, pytest.raises(UserError, match="line 2 is no JSON object"):
        list(file.records())
