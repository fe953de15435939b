"""`mtp-train compare`: alike or refused, resumed rather than repeated, and what its table and picture hold."""

import json
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from matplotlib.image import imread
from rich.console import Console

from mtp.errors import UserError
from tests.train.runs import job, train
from train import compare, compare_measure, compare_picture, compare_table
from train.cli import main
from train.compare_cli import held
from train.module import HeadsModule

KINDS = ("medusa", "recurrent")


def configs(folder: Path, **changes: Any) -> Path:
    """A folder with a config for each of two architectures; the last one is given `changes` besides."""
    where = folder / "configs"
    where.mkdir(exist_ok=True)
    alike = {"trainer__max_steps": 2, "trainer__val_check_interval": 1, "model__decode__prompts": None}
    for kind in KINDS:
        own = changes if kind == KINDS[-1] else {}
        path = job(folder, **{**alike, "run__checkpoint_every": 1, "model__heads__kind": kind, **own})
        path.rename(where / f"{kind}.yaml")
    (folder / "prompts.jsonl").write_text('{"prompt": "what is 1 and 2?"}\n{"prompt": "what is 3?"}\n')
    return where


def command(folder: Path, *more: str) -> list[str]:
    arguments = ["compare", "--configs", str(folder / "configs"), "--out", str(folder / "out")]
    return [*arguments, "--prompts", str(folder / "prompts.jsonl"), "--max-new-tokens", "6", *more]


def compared(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """The JSON document of a comparison."""
    assert main(command(folder, "--json", *more)) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def counted(monkeypatch: pytest.MonkeyPatch, name: str, stop_at: int | None = None) -> list[Any]:
    """The last argument of every call of `fit` or `measure`; Ctrl-C comes instead of call `stop_at`."""
    calls: list[Any] = []
    module = {"fit": compare, "measure": compare_measure}[name]
    real: Callable[..., Any] = getattr(module, name)

    def replacement(*arguments: Any) -> Any:
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        calls.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(module, name, replacement)
    return calls


def test_from_configs_to_table_and_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the middle of measuring; the same command does the rest, and a third time nothing."""
    configs(tmp_path)
    with monkeypatch.context() as patch:
        measured = counted(patch, "measure", stop_at=5)
        assert main(command(tmp_path)) == 130
        assert "Go on with\nmtp-train compare --configs" in capsys.readouterr().err
        assert len(json.loads((tmp_path / "out" / "results.json").read_text())) == 5
    fits, measured = counted(monkeypatch, "fit"), counted(monkeypatch, "measure")
    document = compared(tmp_path, capsys)
    assert not fits
    assert len(measured) == 2 + 2 * 2 * 2 - 5
    assert [row["name"] for row in document["rows"]] == list(KINDS)
    for row in document["rows"]:
        assert row["kind"] == row["name"]
        assert row["steps"] == 2
        assert row["seconds_training"] > 0
        assert row["parameters"] > 1000
        assert len(row["alpha"]) == 2
        found = [(one["temperature"], one["draft_length"], one["verify"]) for one in row["measured"]]
        assert found == [(0.0, 1, "greedy"), (0.0, 2, "greedy"), (1.0, 1, "block"), (1.0, 2, "block")]
        assert all(1 <= one["accept_len"] <= one["draft_length"] + 1 for one in row["measured"])
    about = document["about"]
    assert {"hardware", "threads", "dtype", "versions", "prompts", "num_prompts", "data", "seed"} <= about.keys()
    assert document["rows"][0]["tokens_trained"] == document["rows"][1]["tokens_trained"] > 0
    out = tmp_path / "out"
    assert json.loads((out / "compare.json").read_text()) == document
    assert (out / "compare.md").read_text() == compare_table.markdown(document)
    assert imread(out / "compare.png").shape == (540, 1200, 4)
    assert not list(out.glob("*.part"))

    again, count = (out / "results.json").read_bytes(), len(measured)
    assert compared(tmp_path, capsys) == document
    assert (out / "results.json").read_bytes() == again
    compared(tmp_path, capsys, "--limit", "1")
    assert len(measured) == count + 10, "other prompts are other numbers"
    compared(tmp_path, capsys)
    assert len(measured) == count + 10, "and those of before are still there"


def test_an_interrupted_training_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run is stopped after its first step: the same heads, tokens and validation as without."""
    configs(tmp_path)
    whole = compared(tmp_path, capsys)
    out = tmp_path / "out"
    weights = (out / "recurrent" / "heads" / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    with monkeypatch.context() as patch:
        steps, real = [], HeadsModule.on_train_batch_start

        def third_step(self: Any, batch: Any, batch_idx: int) -> None:
            steps.append(batch_idx)
            if len(steps) == 4:
                raise KeyboardInterrupt
            real(self, batch, batch_idx)

        patch.setattr(HeadsModule, "on_train_batch_start", third_step)
        assert main(command(tmp_path)) == 130
    assert (out / "recurrent" / "checkpoints" / "last.ckpt").is_file()
    assert "tokens_trained" not in json.loads((out / "recurrent" / "run.json").read_text())
    fits = counted(monkeypatch, "fit")
    resumed = compared(tmp_path, capsys)
    assert [arguments[-2] for arguments in fits] == ["--ckpt_path"]
    for one, other in zip(whole["rows"], resumed["rows"], strict=True):
        assert (one["tokens_trained"], one["alpha"]) == (other["tokens_trained"], other["alpha"])
    assert (out / "recurrent" / "heads" / "model.safetensors").read_bytes() == weights


def test_a_run_that_ended_before_its_first_checkpoint_starts_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs(tmp_path)
    left = tmp_path / "out" / "medusa"
    (left / "csv").mkdir(parents=True)
    compared(tmp_path, capsys)
    assert not (tmp_path / "out" / "medusa-2").exists()
    shutil.rmtree(left)
    left.mkdir()
    (left / "thesis.tex").write_text("mine")
    assert main(command(tmp_path)) == 2
    assert "is no run of mtp-train, it holds thesis.tex" in capsys.readouterr().err
    assert (left / "thesis.tex").is_file()


UNLIKE = {
    "steps": ({"trainer__max_steps": 3}, "trainer.max_steps: 2 and 3"),
    "batch": ({"data__batch_size": 2}, "data.batch_size: 4 and 2"),
    "accumulate": ({"trainer__accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches: 1 and 2"),
    "K": ({"model__heads__draft_length": 3}, "model.heads.draft_length: 2 and 3"),
    "data": ({"data__train": {"other.jsonl": 1.0}}, "data.train.other.jsonl: None and 1.0"),
    "base": ({"model__base__dtype": "bfloat16"}, "model.base.dtype: auto and bfloat16"),
    "loss": ({"model__loss__decay": 0.5}, "model.loss.decay: 0.8 and 0.5"),
    "seed": ({"seed_everything": 3}, "seed_everything: 0 and 3"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_configs_that_are_not_alike_are_refused(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = UNLIKE[case]
    configs(tmp_path, **changes)
    assert main(command(tmp_path)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert "A comparison needs the same base, data, tokens, loss and draft_length" in error
    assert not (tmp_path / "out").exists()


def test_what_may_differ_and_what_set_makes_alike(tmp_path: Path) -> None:
    changes = {"model__optimizer": {"kind": "muon", "lr": 0.02}, "model__start_positions": 0}
    where = configs(tmp_path, trainer__max_steps=3, model__heads__init="base", **changes)
    with pytest.raises(UserError, match=r"trainer\.max_steps: 2 and 3"):
        compare.read_plans(where, tmp_path / "out")
    plans = compare.read_plans(where, tmp_path / "out", ["trainer.max_steps=5"])
    assert [plan.keys["trainer.max_steps"] for plan in plans] == [5, 5]
    assert [plan.folder for plan in plans] == [tmp_path / "out" / kind for kind in KINDS]


BAD = {
    "no configs": (["--configs", "nowhere"], "--configs nowhere holds no .yaml file"),
    "no prompts": (["--prompts", "nowhere.jsonl"], "--prompts nowhere.jsonl is not a file"),
    "limit": (["--limit", "0"], "--limit is 0"),
    "tokens": (["--max-new-tokens", "0"], "--max-new-tokens is 0"),
    "set": (["--set", "trainer.max_steps"], "--set is 'trainer.max_steps'; give key=value"),
    "set a name": (["--set", "run.name=x"], "which a comparison decides itself"),
    "set an unknown key": (["--set", "trainer.steps=3"], "steps"),
    "devices": (["--set", "trainer.devices=2"], "trains and measures in one process"),
    "clock": (["--set", "trainer.max_time=00:00:01:00"], "gives a slow architecture fewer tokens"),
    "readme": (["--readme", "nowhere.md"], "--readme nowhere.md is not a file"),
    "markers": (["--readme", "prompts.jsonl"], "lacks the lines <!-- compare:begin -->"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_named_before_anything_is_trained(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configs(tmp_path)
    monkeypatch.chdir(tmp_path)
    more, message = BAD[case]
    assert main(command(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_runs_of_other_settings_and_damaged_results_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configs(tmp_path)
    compared(tmp_path, capsys)
    assert main(command(tmp_path, "--set", "trainer.max_steps=3")) == 2
    assert "another configuration" in (error := capsys.readouterr().err)
    assert "trainer.max_steps: 2, now 3" in error
    record = tmp_path / "out" / "medusa" / "run.json"
    known = json.loads(record.read_text())
    record.write_text(json.dumps({**known, "tokens_trained": 7}))
    assert main(command(tmp_path)) == 2
    assert "saw different numbers of tokens (medusa 7, recurrent" in capsys.readouterr().err
    record.write_text(json.dumps(known))
    (tmp_path / "out" / "results.json").write_text('{"half": ')
    assert main(command(tmp_path)) == 2
    assert "results.json cannot be read" in capsys.readouterr().err


def test_a_run_records_what_it_took(tmp_path: Path) -> None:
    run = train(tmp_path, model__decode__prompts=None, trainer__max_steps=4, trainer__val_check_interval=2)
    record = json.loads((run / "run.json").read_text())
    assert record["seed"] == 0, "what was there stays"
    assert (record["steps"], record["threads"], record["device"]) == (4, torch.get_num_threads(), "cpu")
    assert record["best"]["step"] in (2, 4)
    assert 0 < record["best"]["val/alpha/1"] <= 1
    assert record["tokens_trained"] > 4 * 4 * 10
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == 4


def document(names: tuple[str, ...] = ("hydra", "medusa"), drafts: int = 3) -> dict[str, Any]:
    """A comparison that never was."""

    def measured(shift: float, ks: range) -> list[dict[str, Any]]:
        return [
            {
                "draft_length": k,
                "temperature": t,
                "verify": "block" if t else "greedy",
                "accept_len": 1 + k * (0.2 + shift) / (1 + t),
                "tok_per_s": 20.0 - abs(k - 2) + t,
            }
            for t in (0.0, 1.0)
            for k in ks
        ]

    best = {"step": 4, **{f"val/alpha/{k}": 0.5 / k for k in range(1, drafts + 1)}}
    record = {"parameters": 12_345_678, "seconds_training": 90.0, "tokens_trained": 65_432, "steps": 400}
    record |= {"device": "cpu", "threads": 2, "best": best}
    about = {"base": "tiny", "dtype": "float32", "hardware": "Abacus, 2 cores", "threads": 2, "data": "mine.jsonl"}
    about |= {"num_prompts": 40, "prompts": "held.jsonl", "max_new_tokens": 64, "seed": 0, "versions": {"mtp": "9"}}
    ks = range(1, drafts + 1)
    return {
        "about": about,
        "draft_length": drafts,
        "temperatures": [0.0, 1.0],
        "rules": {"0": "greedy", "1": "block"},
        "plain": measured(0.0, range(1)),
        "rows": [compare_table.row(name, record, name, measured(i / 20, ks)) for i, name in enumerate(names)],
    }


def test_the_table() -> None:
    lines = compare_table.markdown(document()).splitlines()
    assert lines[0].startswith("| heads | parameters | minutes | α_k, k = 1…3 | τ at T = 0, K = 1…3 | τ at")
    assert lines[2] == (
        "| hydra | 12.3 M | 1.5 | 0.50 / 0.25 / 0.17 | 1.20 / 1.40 / 1.60 | 1.10 / 1.20 / 1.30 | 20.0 (2) | 21.0 (2) |"
    )
    assert lines[3].startswith("| medusa | 12.3 M | 1.5 | 0.50 / 0.25 / 0.17 | 1.25 / 1.50 / 1.75 |")
    assert lines[4] == "| none | - | - | - | 1 | 1 | 18.0 | 19.0 |"
    for part in ("Abacus, 2 cores", "2 threads", "float32", "mtp 9", "40 prompts of held.jsonl", "65,432 tokens"):
        assert part in lines[-1]
    assert "greedy at T = 0, block at T = 1" in lines[-1]
    training, decoding = compare_table.console_tables(document())
    assert (training.row_count, decoding.row_count) == (2, 2 * 3)
    screen = Console(width=80, record=True, file=StringIO())
    screen.print(*compare_table.console_tables(document(drafts=5)))
    assert "…" not in (shown := screen.export_text())
    assert "18.0 (0)" in shown


def test_a_run_without_validation_has_no_alpha() -> None:
    (one, *_) = document()["rows"]
    row = compare_table.row("x", {"best": None}, "medusa", one["measured"])
    assert row["alpha"] == []


def test_the_readme_block() -> None:
    text = f"# a\n{compare_table.BEGIN}\nold\n{compare_table.END}\nb\n"
    assert compare_table.with_block(text, "", "x") == f"# a\n{compare_table.BEGIN}\n{compare_table.END}\nb\n"
    once = compare_table.with_block(text, "new\n", "x")
    assert once == f"# a\n{compare_table.BEGIN}\nnew\n{compare_table.END}\nb\n"
    assert compare_table.with_block(once, "new\n", "x") == once
    with pytest.raises(UserError, match="lacks the lines"):
        compare_table.with_block(f"{compare_table.END} {compare_table.BEGIN}", "", "x")


@pytest.mark.parametrize("drafts", [1, 5])
def test_the_picture(drafts: int, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(compare_picture.draw(document(("a", "b", "c", "d", "e", "f", "g"), drafts)))
    assert imread(path).shape == (540, 1200, 4)


def test_names_in_the_picture_keep_apart() -> None:
    assert compare_picture.spread([1.0, 3.0, 2.0], 0.5) == [1.0, 3.0, 2.0]
    places = compare_picture.spread([2.0, 2.0, 2.1, 5.0], 1.0)
    assert places[3] == 5.0
    assert [round(place - places[0], 6) for place in places[:3]] == [0.0, 1.0, 2.0]
    assert sum(places[:3]) == pytest.approx(6.1)
    chained = compare_picture.spread([0.0, 0.9, 1.8, 1.8], 1.0)
    assert min(b - a for a, b in zip(chained, chained[1:], strict=False)) == pytest.approx(1.0)


def test_two_comparisons_in_one_folder_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs(tmp_path)
    with held(tmp_path / "out"):
        assert main(command(tmp_path)) == 2
    assert "is being written by another comparison; wait for it" in capsys.readouterr().err
    assert not (tmp_path / "out" / "medusa").exists()
    with held(tmp_path / "out"):
        pass  # it is free again
