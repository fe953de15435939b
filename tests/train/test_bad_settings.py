"""Settings that cannot work, and what goes wrong on the way: one message, exit code 2, nothing good is lost."""

import errno
from pathlib import Path
from typing import Any

import pytest

from mtp.errors import UserError
from tests.train.runs import job, train
from train import feature_store
from train.answers import AnswerFile
from train.cli import main

PLAIN: dict[str, Any] = {"model__decode__prompts": None}
NEVER_GOOD = {
    "optimizer.lr is inf": {"model__optimizer__lr": float("inf")},
    "optimizer.weight_decay is -1.0": {"model__optimizer__weight_decay": -1.0},
    "optimizer.betas is (2.0, 3.0)": {"model__optimizer__betas": [2.0, 3.0]},
    "decode.max_new_tokens is 0": {"model__decode__max_new_tokens": 0},
    "decode.temperature is nan": {"model__decode__temperature": float("nan")},
    "decode.seed is -1": {"model__decode__seed": -1},
    "model.start_positions is -1": {"model__start_positions": -1},
    "data.train has the source": {"data__train": {5: 1.0}},
}


@pytest.mark.parametrize("message", NEVER_GOOD)
def test_a_setting_that_cannot_work_is_named_before_anything_is_made(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(job(tmp_path, **{**PLAIN, **NEVER_GOOD[message]}))]) == 2
    assert message in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*"))


def test_training_that_diverges_stops_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {**PLAIN, "model__optimizer__lr": 1e30, "model__start_positions": 0, "trainer__max_steps": 9}
    assert main(["--config", str(job(tmp_path, **changes))]) == 2
    error = capsys.readouterr().err
    assert "training diverged at step" in error
    assert "model.optimizer.lr, which is 1e+30" in error


@pytest.mark.parametrize(("first", "then"), [("adamw", "muon"), ("muon", "adamw")])
def test_another_optimizer_cannot_resume(
    first: str, then: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path, **PLAIN, model__optimizer__kind=first, trainer__max_steps=3)
    other = job(tmp_path, **PLAIN, model__optimizer__kind=then)
    assert main(["--config", str(other), "--ckpt_path", str(run / "checkpoints" / "last.ckpt")]) == 2
    assert f"optimizer.kind {first}, and the configuration has {then}" in capsys.readouterr().err


def test_no_steps_no_heads_and_no_commands_for_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(job(tmp_path, **PLAIN, trainer__max_steps=0))]) == 0
    told = capsys.readouterr().out
    assert "no step was taken" in told
    assert "mtp-decode" not in told


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "shard")


def test_a_disk_that_fills_up_while_features_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_store, "save_file", full)
    features = {"keep": True, "dir": str(tmp_path / "features")}
    assert main(["--config", str(job(tmp_path, **PLAIN, model__features=features))]) == 2
    assert "make room or name another features.dir" in capsys.readouterr().err


def test_two_writers_of_one_file_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    prompts = [[{"role": "user", "content": "hi"}]]
    with AnswerFile(out, {"seed": 0}, prompts) as file:
        file.append([{"index": 0, "messages": [*prompts[0], {"role": "assistant", "content": "ho"}]}])
        with pytest.raises(UserError, match="is being written by another process"):
            AnswerFile(out, {"seed": 0}, prompts)
    with AnswerFile(out, {"seed": 0}, prompts) as file:
        assert file.done == {0}
