"""Every YAML in configs/ runs for two steps on the real base, through the command line."""

from pathlib import Path

import pytest

from mtp.base import FrozenBase
from mtp.hub import load_heads
from tests.train.runs import read_metrics
from train.cli import main
from train.compare import read_plans

SEVERAL_GPUS = {"one-node-8-gpus", "fsdp-70b-several-nodes"}  # see test_many_device_configs.py
CONFIGS = [path for path in sorted(Path("configs").glob("*.yaml")) if path.stem not in SEVERAL_GPUS] + sorted(
    Path("configs/compare").glob("*.yaml")
)


def test_there_are_configs() -> None:
    assert "demo" in {path.stem for path in CONFIGS}
    assert {"medusa", "hydra", "sequential", "parallel", "recurrent"} <= {path.stem for path in CONFIGS}


def test_the_compared_configs_are_alike(tmp_path: Path) -> None:
    plans = read_plans(Path("configs/compare"), tmp_path / "out")
    assert {plan.name: plan.keys["model.heads.kind"] for plan in plans} == {plan.name: plan.name for plan in plans}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_runs_two_steps(path: Path, tmp_path: Path, smollm2: FrozenBase) -> None:
    arguments = ["--config", str(path), "--run.dir", str(tmp_path), "--run.wandb_project", "null"]
    arguments += ["--data.train", "configs/data/demo_answers.jsonl", "--data.limit", "16", "--data.val_size", "2"]
    arguments += [
        "--data.batch_size",
        "2",
        "--data.max_length",
        "64",
        "--model.features.dir",
        str(tmp_path / "features"),
    ]
    arguments += ["--trainer.max_steps", "2", "--trainer.val_check_interval", "2", "--trainer.log_every_n_steps", "1"]
    arguments += ["--trainer.accumulate_grad_batches", "1", "--trainer.limit_val_batches", "1"]
    arguments += ["--model.decode.limit", "1", "--model.decode.max_new_tokens", "4"]
    assert main(arguments) == 0
    (run,) = [folder for folder in tmp_path.iterdir() if folder.name != "features"]
    rows = read_metrics(run)
    assert [row["step"] for row in rows if row.get("train/loss")] == ["1", "2"]
    assert any(row.get("decode/accept_len") for row in rows)
    assert load_heads(run / "heads").config.base.fingerprint == smollm2.fingerprint()
