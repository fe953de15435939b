"""Training goes on from earlier heads: their weights and vocabulary, and only where they are what the config says."""

from pathlib import Path

import pytest
import torch

from mtp.hub import load_heads
from tests.train.runs import job, train
from train.cli import main

SHORT = {"model__decode__prompts": None, "trainer__max_steps": 2}
STILL = {"model__optimizer__lr": 1e-12}


def test_heads_go_on_from_where_they_were(tmp_path: Path) -> None:
    first = train(tmp_path, **SHORT)
    second = train(tmp_path, model__start_from=str(first / "heads"), **SHORT, **STILL)
    fresh = train(tmp_path, **SHORT, **STILL)
    was, now, other = (load_heads(run / "heads").state_dict() for run in (first, second, fresh))
    for name, tensor in was.items():
        assert torch.allclose(now[name].double(), tensor.double(), atol=1e-9), name
    assert any(not torch.equal(other[name], tensor) for name, tensor in was.items())


@pytest.mark.parametrize("draft_length", [1, 3])
def test_recurrent_heads_go_on_with_another_draft_length(draft_length: int, tmp_path: Path) -> None:
    first = train(tmp_path, **SHORT)
    longer = {"model__heads__draft_length": draft_length, **SHORT, **STILL}
    second = train(tmp_path, model__start_from=str(first / "heads"), **longer)
    was, now = (load_heads(run / "heads") for run in (first, second))
    assert (was.config.draft_length, now.config.draft_length) == (2, draft_length)
    for name, tensor in was.state_dict().items():
        assert torch.allclose(now.state_dict()[name].double(), tensor.double(), atol=1e-9), name


def test_other_kinds_keep_their_draft_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = {"model__heads__kind": "sequential"}
    first = train(tmp_path, **kind, **SHORT)
    path = job(tmp_path, model__start_from=str(first / "heads"), model__heads__draft_length=3, **kind, **SHORT)
    assert main(["--config", str(path)]) == 2
    assert "draft_length 2 instead of 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model__heads__feature_layers": [1]}, "feature_layers "),
        ({"model__heads__draft_vocab_size": 30}, "draft_vocab_size 40 instead of 30"),
        ({"model__heads__kind": "sequential"}, "kind recurrent instead of sequential"),
    ],
)
def test_other_heads_than_described_are_refused(
    change: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = train(tmp_path, **SHORT)
    path = job(tmp_path, model__start_from=str(first / "heads"), **{**SHORT, **change})
    assert main(["--config", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_heads_of_another_base_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train(tmp_path, **SHORT)
    other = job(tmp_path, "qwen2", model__start_from=str(first / "heads"), **SHORT)
    assert main(["--config", str(other)]) == 2
    assert "model.start_from" in capsys.readouterr().err


def test_a_resumed_run_does_not_fit_the_start_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, **SHORT)
    assert "fitted in closed form" in capsys.readouterr().out
    train(tmp_path, "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), **{**SHORT, "trainer__max_steps": 3})
    assert "fitted in closed form" not in capsys.readouterr().out
