"""`mtp-decode generate --prompts --output`: what a line holds, that the same command continues, and what it refuses."""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.cli import main
from decode.whole_lines import WholeLines
from mtp.config import HeadsOptions
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.tiny import CONTEXT, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["the user", "an ant", "the ant in the inn", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("file")
    base = tiny_base("llama", folder)
    for name in ("heads", "others"):
        torch.manual_seed(len(name))
        save_heads(new_heads(HeadsOptions(draft_length=3), base), folder / name)
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    (folder / "good.jsonl").write_text("\n".join(lines))
    lines.insert(1, '{"prompt": ')
    lines.insert(3, json.dumps({"prompt": "hi " * CONTEXT}))
    (folder / "mixed.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def generate(folder: Path, tmp_path: Path) -> Callable[..., int]:
    def run(*args: object, heads: str = "heads", prompts: str = "good") -> int:
        given = [
            "--heads",
            folder / heads,
            "--prompts",
            folder / f"{prompts}.jsonl",
            "--output",
            tmp_path / "out.jsonl",
        ]
        return main(["generate", *map(str, given), "--max-new-tokens", "8", *map(str, args)])

    return run


def records(path: Path) -> list[dict[str, Any]]:
    """The lines by their prompt, without seconds, which always differ, and alpha, which a batch rounds otherwise."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in found:
        for name in ("seconds", "alpha"):
            record.get("stats", {}).pop(name, None)
    return sorted(found, key=lambda record: int(record["index"]))


def test_what_a_line_holds(generate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate("--temperature", 1, "--seed", 3, "--logprobs", "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    lines = records(tmp_path / "out.jsonl")
    assert [(line["index"], line["prompt"]) for line in lines] == list(enumerate(PROMPTS))
    assert len({line["settings"] for line in lines}) == 1
    for line in lines:
        assert line["finish_reason"] in {"eos", "length"}
        assert len(line["logprobs"]) == len(line["token_ids"]) == line["stats"]["committed"]
    assert (report["found"], report["written"], report["failed"]) == (0, 4, [])
    assert report["committed"] == sum(len(line["token_ids"]) for line in lines)
    assert "4 written, 0 of all failed" in err


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_same_command_goes_on(
    generate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], batch_size: int
) -> None:
    args = ("--temperature", 1, "--seed", 3, "--batch-size", batch_size)
    path = tmp_path / "out.jsonl"
    assert generate(*args) == 0
    whole = records(path)
    path.unlink()
    assert generate(*args, "--limit", 2) == 0
    path.write_bytes(path.read_bytes()[:-5])  # killed while it wrote a line
    capsys.readouterr()
    assert generate(*args) == 0
    assert "1 were there, 3 written" in capsys.readouterr().err
    assert records(path) == whole
    before = path.read_bytes()
    assert generate(*args, "--json") == 0
    assert json.loads(capsys.readouterr().out)["written"] == 0
    assert path.read_bytes() == before


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_bad_prompt_is_a_line_and_stops_nothing(
    generate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], batch_size: int
) -> None:
    for turn in range(2):  # the second one has nothing to do, and says the same
        assert generate("--batch-size", batch_size, "--quiet", prompts="mixed") == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 2, turn
        assert "error: prompt 2: --prompts" in err
        assert "error: prompt 4: the prompt has" in err
    lines = records(tmp_path / "out.jsonl")
    assert [line["prompt"] for line in lines if "text" in line] == PROMPTS
    assert [line["index"] for line in lines if "error" in line] == [1, 3]
    assert "is not JSON" in lines[1]["error"]
    assert len(lines) == 6


def test_ctrl_c_keeps_what_is_done(
    generate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, append = [], WholeLines.append

    def second_time(self: WholeLines, record: dict[str, Any]) -> None:
        append(self, record)
        written.append(record)
        if len(written) == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(WholeLines, "append", second_time)
        assert generate() == 130
    assert "interrupted; the same command goes on" in capsys.readouterr().err
    assert len(records(tmp_path / "out.jsonl")) == 2
    assert generate() == 0
    assert [line["index"] for line in records(tmp_path / "out.jsonl")] == [0, 1, 2, 3]


def test_what_it_does_not_continue(
    generate: Callable[..., int], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate("--limit", 1) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    (folder / "turned.jsonl").write_text(json.dumps({"prompt": "another"}))
    for refused, told in (
        (lambda: generate("--temperature", 1), "was begun with temperature 0.0, and now it is 1.0"),
        (lambda: generate("--stop", "x"), "was begun with stop [], and now it is ['x']"),
        (lambda: generate(heads="others"), "was begun with heads "),
        (lambda: generate(prompts="turned"), "line 1 is of another prompt than number 1 of --prompts"),
    ):
        capsys.readouterr()
        assert refused() == 2
        assert told in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert generate("--batch-size", 2) == 0  # which changes no text


def test_prompts_come_from_a_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--heads", str(folder / "heads"), "--prompt", "a", "--output", str(tmp_path / "out.jsonl")]
    assert main(args) == 2
    assert "which takes its prompts from a file; use --prompts FILE" in capsys.readouterr().err
