"""Every command and snippet of the README runs, in order, in a fresh folder; long ones are cut short, none skipped."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import decode.cli
import train.cli
from mtp.base import FrozenBase

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAST_FIT = ["--run.wandb_project", "null", "--data.limit", "24", "--data.val_size", "4", "--data.max_length", "64"]
FAST_FIT += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--model.decode.limit", "1"]
FAST_FIT += ["--model.decode.max_new_tokens", "4", "--model.start_positions", "500", "--model.features.dir", "features"]
PROGRAMS: dict[str, Callable[[list[str]], int]] = {"mtp-train": train.cli.main, "mtp-decode": decode.cli.main}


def blocks(language: str) -> list[str]:
    """The contents of fenced blocks of a language, in order; "" are those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands() -> list[list[str]]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


FEW = "few"  # a folder with two of the configs to compare


def shortened(command: list[str]) -> list[str]:
    """The same command with less to do. `mtp-train` takes the last of a repeated option."""
    program, *arguments = command
    if arguments[0] == "lab":
        return [*arguments, *(["--max-new-tokens", "4"] if "--heads" in arguments else [])]
    if arguments[0] in ("export", "import", "push", "report", "dashboard"):
        return arguments
    if arguments[0] == "check":
        return [*arguments, "--samples", "300", "--max-new-tokens", "6"]
    if program == "mtp-decode":
        limit = ["--limit", "2"] if "--limit" in arguments else []
        return [*arguments, "--max-new-tokens", "6", *limit]
    if arguments[0] == "compare":
        changes = [
            f"{key.removeprefix('--')}={value}" for key, value in zip(FAST_FIT[::2], FAST_FIT[1::2], strict=True)
        ]
        sets = [part for change in [*changes, "model.heads.draft_length=1"] for part in ("--set", change)]
        fewer = [FEW if argument == "configs/compare" else argument for argument in arguments]
        return [*fewer, *sets, "--max-new-tokens", "4", "--limit", "1"]
    if arguments[0] == "regenerate":
        return [*arguments, "--max-new-tokens", "4", "--limit", "3"]
    if "--ckpt_path" in arguments:  # goes on from step 2
        return [*arguments, *FAST_FIT, "--trainer.max_steps", "3"]
    return [*arguments, *FAST_FIT]


def test_every_command_and_snippet_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, smollm2: FrozenBase) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / FEW).mkdir()
    for kind in ("medusa", "recurrent"):  # all five train in tests/test_configs.py
        (tmp_path / FEW / f"{kind}.yaml").write_text((ROOT / "configs" / "compare" / f"{kind}.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    seen = set()
    for command in commands():
        if command[0] == "make":
            dry = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, text=True)
            assert dry.returncode == 0, dry.stderr
            if command[1] == "demo":  # what follows uses the run that the demo leaves
                assert train.cli.main(["--config", "configs/demo.yaml", *FAST_FIT]) == 0
        else:
            assert PROGRAMS[command[0]](shortened(command)) == 0, command
        seen.add(tuple(command[:2]))
    assert {("make", "demo"), ("make", "test"), ("mtp-decode", "bench"), ("mtp-train", "regenerate")} <= seen
    assert ("mtp-train", "compare") in seen
    for snippet in blocks("python"):
        short = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", snippet)
        exec(compile(short, "README.md", "exec"), {})


def test_every_file_in_the_tree_exists() -> None:
    (tree,) = blocks("")
    folder = ""
    for line in tree.splitlines():
        if not line.startswith(" "):
            folder = line.split()[0]
        for name in re.findall(r"[\w./]+\.py", line):
            near = [ROOT / folder / part / name for part in (".", "heads", "formats")]
            assert any(path.is_file() for path in near), f"{folder}{name}"
    listed = set(re.findall(r"(\w+)\.py", tree))
    for package in ("mtp", "decode", "train"):
        present = {path.stem for path in (ROOT / package).rglob("*.py")} - {"__init__", "__main__"}
        assert present <= listed, f"missing from the tree: {present - listed}"
