"""Every command and snippet of the README runs, section by section, in fresh folders; long ones are cut short, none is
skipped."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import decode.cli
import train.cli
from mtp.base import FrozenBase

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FAST_FIT = ["--run.wandb_project", "null", "--data.limit", "12", "--data.val_size", "2", "--data.max_length", "48"]
FAST_FIT += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--model.decode.limit", "1"]
FAST_FIT += ["--model.decode.max_new_tokens", "4", "--model.start_positions", "100", "--model.features.dir", "features"]
FAST_FIT += ["--data.batch_size", "2"]
PROGRAMS: dict[str, Callable[[list[str]], int]] = {"mtp-train": train.cli.main, "mtp-decode": decode.cli.main}


def blocks(language: str, text: str = README) -> list[str]:
    """The contents of fenced blocks of a language, in order; "" are those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def commands(text: str = README) -> list[list[str]]:
    lines = [line for block in blocks("sh", text) for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def sections() -> dict[str, str]:
    """The README's parts that have something to run, by heading."""
    parts = re.split(r"^## ", README, flags=re.MULTILINE)
    named = {part.partition("\n")[0].strip("# "): part for part in parts}
    return {name: text for name, text in named.items() if commands(text) or blocks("python", text)}


SECTIONS = sections()


FASTER = ("model.heads.draft_length=1", "trainer.precision=32-true")  # half precision is slow where it is emulated
FEW = "few"  # a folder with two of the configs to compare


def shortened(command: list[str]) -> list[str]:
    """The same command with less to do. `mtp-train` takes the last of a repeated option."""
    program, *arguments = command
    if arguments[0] == "lab":
        return [*arguments, *(["--max-new-tokens", "4"] if "--heads" in arguments else [])]
    if arguments[0] in ("export", "import", "push", "report", "dashboard"):
        return arguments
    if arguments[0] == "check":
        return [*arguments, "--samples", "300", "--max-new-tokens", "3"]
    if program == "mtp-decode":
        limit = ["--limit", "1" if arguments[0] == "bench" else "2"] if "--prompts" in arguments else []
        behind = ["--context", "400"] if "--context" in arguments else []
        return [*arguments, "--max-new-tokens", "6", *limit, *behind]
    if arguments[0] == "compare":
        changes = [
            f"{key.removeprefix('--')}={value}" for key, value in zip(FAST_FIT[::2], FAST_FIT[1::2], strict=True)
        ]
        sets = [part for change in [*changes, *FASTER] for part in ("--set", change)]
        fewer = [FEW if argument == "configs/compare" else argument for argument in arguments]
        return [*fewer, *sets, "--max-new-tokens", "4", "--limit", "1"]
    if arguments[0] == "regenerate":
        return [*arguments, "--max-new-tokens", "4", "--limit", "3"]
    if "--ckpt_path" in arguments:  # goes on from step 2
        return [*arguments, *FAST_FIT, "--trainer.max_steps", "3"]
    return [*arguments, *FAST_FIT]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory, smollm2: FrozenBase) -> Path:
    """The run that `make demo` leaves, of two steps."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        (folder / "configs").symlink_to(ROOT / "configs")
        assert train.cli.main(["--config", "configs/demo.yaml", *FAST_FIT]) == 0
    return folder / "runs" / "demo"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_command_and_snippet_runs(
    section: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / FEW).mkdir()
    for kind in ("medusa", "recurrent"):  # all five train in tests/test_configs.py
        (tmp_path / FEW / f"{kind}.yaml").write_text((ROOT / "configs" / "compare" / f"{kind}.yaml").read_text())
    if "runs/demo/" in SECTIONS[section]:
        shutil.copytree(demo, tmp_path / "runs" / "demo")
    monkeypatch.chdir(tmp_path)
    before = list(SECTIONS)[: list(SECTIONS).index(section)]
    known = [command for other in before for command in commands(SECTIONS[other])]
    for command in commands(SECTIONS[section]):
        if command[0] == "make":
            dry = subprocess.run(["make", "-n", *command[1:]], cwd=ROOT, capture_output=True, text=True)
            assert dry.returncode == 0, dry.stderr
        elif command not in known:  # one that stands in two sections runs in the first
            assert PROGRAMS[command[0]](shortened(command)) == 0, command
    for snippet in blocks("python", SECTIONS[section]):
        short = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", snippet)
        exec(compile(short, "README.md", "exec"), {})


def test_sections_have_all_there_is_to_run() -> None:
    assert [command for text in SECTIONS.values() for command in commands(text)] == commands()
    assert [snippet for text in SECTIONS.values() for snippet in blocks("python", text)] == blocks("python")
    seen = {tuple(command[:2]) for command in commands()}
    assert {("make", "demo"), ("make", "test"), ("mtp-decode", "bench"), ("mtp-train", "regenerate")} <= seen
    assert ("mtp-train", "compare") in seen


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
