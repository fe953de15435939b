"""Training on a base whose weights are rounded: heads learn the rounded one, in float32, and say which base it was."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from mtp.hub import load_heads
from tests.tiny import tiny_base
from tests.train.runs import job, read_metrics, train
from train.cli import main

SHORT: dict[str, Any] = {"trainer__max_steps": 2, "model__decode__prompts": None, "trainer__val_check_interval": 2}


@pytest.fixture
def rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of torchao, which need not be installed: matrices rounded to a quarter. Only once transformers, which
    looks for torchao as well, has loaded a model."""
    tiny_base("llama", tmp_path)
    fake = ModuleType("torchao.quantization")

    def quantize_(module: nn.Module, config: object) -> None:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.data = (part.weight.data * 4).round() / 4

    fake.quantize_, fake.Int8WeightOnlyConfig = quantize_, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)


def last(run: Path, key: str) -> float:
    return [float(row[key]) for row in read_metrics(run) if row.get(key)][-1]


@pytest.mark.usefixtures("rounding")
def test_heads_learn_the_rounded_base(tmp_path: Path) -> None:
    kept = {"keep": True, "dir": str(tmp_path / "kept")}
    full = train(tmp_path, model__features=kept, **SHORT)
    rounded = train(tmp_path, "--model.base.quantise", "int8", run__name="rounded", model__features=kept, **SHORT)
    again = train(tmp_path, "--model.base.quantise", "int8", run__name="again", **SHORT)
    heads = load_heads(rounded / "heads")
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    assert heads.config.base.fingerprint == load_heads(full / "heads").config.base.fingerprint
    assert last(rounded, "val/loss") != pytest.approx(last(full, "val/loss"), rel=1e-3)
    assert last(rounded, "val/loss") == pytest.approx(last(again, "val/loss"), rel=0.05), (
        "kept features are rounded too"
    )
    assert len(list((tmp_path / "kept").iterdir())) == 2, "those of each base in a folder of their own"


def test_a_base_in_half_precision_trains_heads_in_single(tmp_path: Path) -> None:
    run = train(tmp_path, "--model.base.dtype", "bfloat16", **SHORT)
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"].values()
    kept = [*checkpoint["state_dict"].values(), *(value for state in states for value in state.values())]
    assert {tensor.dtype for tensor in kept if tensor.is_floating_point()} == {torch.float32}
    assert {p.dtype for p in load_heads(run / "heads").parameters()} == {torch.float32}


def test_what_is_not_offered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(job(tmp_path, **SHORT))
    assert main(["--config", config, "--model.base.quantise", "int3"]) == 2
    assert "model.base.quantise is 'int3'; allowed is int8, int4" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert main(["--config", config, "--model.base.quantise", "int4"]) == 2
    assert "model.base.quantise int4 needs torchao" in capsys.readouterr().err
