"""`mtp-decode export` through `main`: what it writes, its JSON, its exit codes, and bad input."""

import json
from pathlib import Path
from typing import Any

import pytest

from decode.cli import main
from mtp.base import FrozenBase
from mtp.formats.eagle3_reader import read_eagle3
from mtp.hub import load_heads, save_heads
from tests.mtp.format_toys import VOCABULARY, base_for_formats, heads_on
from tests.tiny import tiny_base


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    base = base_for_formats(folder)
    save_heads(heads_on(base, "recurrent", VOCABULARY), folder / "heads")
    save_heads(heads_on(base, "medusa"), folder / "medusa")
    return folder


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    code = main([str(arg) for arg in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_says_what_was_written_and_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("export", "--heads", folder / "heads", "--format", "eagle3", "--output", tmp_path / "out", "--json")
    code, out, err = run(capsys, *args)
    assert code == 0, err
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    assert report["compared"] == 3 * len(VOCABULARY)
    assert report["worst"] < 1e-4
    assert "logits compared" in err
    code, _, err = run(capsys, *args)
    assert (code, "--overwrite" in err) == (2, True)
    assert run(capsys, *args, "--overwrite")[0] == 0


def test_bad_input(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads, out = folder / "heads", tmp_path / "out"
    for args, message in (
        (("--format", "eagle3", "--output", out), "--heads is missing"),
        (("--heads", heads, "--output", out), "--format is missing"),
        (("--heads", heads, "--format", "eagle3"), "--output is missing"),
        (("--heads", heads, "--format", "eagle", "--output", out), "--format is 'eagle'; use one of"),
        (("--heads", heads, "--format", "eagle3", "--output", out, "--dtype", "int4"), "--dtype is 'int4'"),
        (("--heads", folder / "medusa", "--format", "eagle3", "--output", out), "vllm-medusa, medusa"),
        (("--heads", tmp_path / "none", "--format", "eagle3", "--output", out), "is not a folder"),
        (("--heads", heads, "--format", "eagle3", "--output", out, "--base", "gone/away/base"), "does not exist"),
    ):
        code, _, err = run(capsys, "export", *args)
        assert (code, message in err) == (2, True), err
    assert list(tmp_path.iterdir()) == []


def test_heads_whose_base_is_gone(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save_heads(load_heads(folder / "heads"), tmp_path / "heads")
    document = json.loads((saved / "config.json").read_text())
    document["base"]["name"] = "/gone/base"
    (saved / "config.json").write_text(json.dumps(document))
    args = ("export", "--heads", saved, "--format", "eagle3", "--output", tmp_path / "out")
    code, _, err = run(capsys, *args)
    assert (code, "/gone/base" in err, "name a copy of it with --base" in err) == (2, True, True), err
    assert run(capsys, *args, "--base", folder / "llama-0")[0] == 0


def test_another_base_has_a_remedy_that_export_knows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tiny_base("llama", tmp_path, 1)
    args = ("export", "--heads", folder / "heads", "--format", "eagle3", "--output", tmp_path / "out")
    code, _, err = run(capsys, *args, "--base", other.name)
    assert (code, "other weights than --base" in err, "use the base they name" in err) == (2, True, True), err
    assert "allow" not in err
    assert not (tmp_path / "out").exists()


def test_the_heads_are_never_overwritten(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save_heads(load_heads(folder / "heads"), tmp_path / "ow" / "heads")
    (tmp_path / "ow" / "precious.txt").write_text("kept")
    before = sorted(tmp_path.rglob("*"))
    for output in (tmp_path / "ow", saved, saved / "out"):
        args = ("export", "--heads", saved, "--format", "eagle3", "--output", output, "--overwrite")
        code, _, err = run(capsys, *args)
        assert (code, "choose another folder" in err) == (2, True), err
    assert sorted(tmp_path.rglob("*")) == before


def test_heads_that_ship_with_the_package(
    smollm2: FrozenBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    args = ("export", "--heads", "smollm2-135m", "--format", "eagle3", "--output", out, "--dtype", "bfloat16")
    code, _, err = run(capsys, *args, "--device", "cpu")
    assert code == 0, err
    reader = read_eagle3(out)
    assert reader.layer_ids == (10, 20, 29)
    assert len(reader.base_ids) == 8192
    assert "bases/smollm2-135m" in (out / "README.md").read_text()
