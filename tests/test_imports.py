"""Who may import whom: mtp <- decode <- train, and mtp stays free of applications."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "mtp": {"decode", "train", "tests", "lightning", "wandb", "jsonargparse", "rich", "argparse", "datasets"},
    "decode": {"train", "tests", "lightning", "datasets"},
    "train": {"tests"},
}
WANDB = {"decode/wandb_run.py", "decode/wandb_media.py", "train/run.py", "train/dashboard_save.py"}
"""Who may know wandb; in `decode` only where it is used, because most commands do without."""


def imported(path: Path) -> set[str]:
    """Top-level names of everything a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("package", FORBIDDEN)
def test_import_directions(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {str(path.relative_to(ROOT)): imported(path) & FORBIDDEN[package] for path in files}
    assert {path: names for path, names in wrong.items() if names} == {}


def test_few_know_wandb_and_decoding_starts_without_it() -> None:
    for package in ("decode", "train"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if "wandb" in imported(path):
                assert str(path.relative_to(ROOT)) in WANDB
                at_start = ast.parse(path.read_text(encoding="utf-8")).body
                names = {alias.name for node in at_start if isinstance(node, ast.Import) for alias in node.names}
                assert package == "train" or "wandb" not in names, path


@pytest.mark.parametrize("package", ["mtp"])
def test_the_library_never_prints_or_reads_the_environment(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            read = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "argv"}
            assert not called, f"{path}:{node.lineno} prints"
            assert not read, f"{path}:{node.lineno} reads {ast.unparse(node)}"


def test_the_negative_control() -> None:
    """The walk above sees imports inside functions: train uses lightning, and some module imports lazily."""
    assert "lightning" in imported(ROOT / "train" / "module.py")
    assert "wandb" in imported(ROOT / "decode" / "wandb_run.py")


def test_whichever_of_two_that_need_each_other_is_imported_first() -> None:
    """`mtp.one_call` is for heads, and speaks of their blocks."""
    for first in ("mtp.one_call", "mtp.heads", "decode.batch"):
        done = subprocess.run([sys.executable, "-c", f"import {first}"], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), first
