"""Two processes train what one does: the same steps from the same batches, whoever holds which half."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.train.runs import job
from tests.train.test_cli import final_state

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")


def launch(folder: Path, *arguments: str) -> Path:
    """Train in a process of its own, as DDP starts its second one from this command line; returns the run's folder."""
    folder.mkdir()
    config = job(folder, model__decode__prompts=None, trainer__max_steps=3, data__batch_size=2)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "train", "--config", str(config), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = [path for path in (folder / "runs").iterdir() if path.is_dir()]
    return run


def test_two_processes_take_the_steps_of_one_that_accumulates(tmp_path: Path) -> None:
    one = final_state(launch(tmp_path / "one", "--trainer.accumulate_grad_batches", "2"))
    two = final_state(launch(tmp_path / "two", *TWO))
    short = final_state(launch(tmp_path / "short"))  # half the batch a step: the comparison can tell
    assert one.keys() == two.keys()
    floats = [name for name, tensor in one.items() if tensor.is_floating_point()]
    assert max(float((one[name] - two[name]).abs().max()) for name in floats) < 1e-5
    assert max(float((one[name] - short[name]).abs().max()) for name in floats) > 1e-3
    assert all(torch.isfinite(two[name]).all() for name in floats)
