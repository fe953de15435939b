"""Two processes train what one does: the same steps from the same batches, whoever holds which half."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import job, read_metrics, train
from tests.train.test_cli import final_state

CHANGES: dict[str, Any] = {
    "model__decode__prompts": None,
    "data__batch_size": 2,
    "trainer__max_steps": 3,
    "trainer__log_every_n_steps": 3,
}
PATIENCE = 180.0  # seconds for two processes; about twenty where nothing else runs, and most of them are imports


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the two processes have: sums are rounded alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_one(folder: Path, *arguments: str) -> Path:
    """Train in this process; returns the run's folder."""
    folder.mkdir()
    return train(folder, *arguments, **CHANGES)


def in_two(folder: Path) -> tuple[Path, str]:
    """Train in a process that starts a second one from its own command line; the run's folder and what was said.
    Nothing that was started outlives this."""
    folder.mkdir()
    command = [sys.executable, "-m", "train", "--config", str(job(folder, **CHANGES))]
    command += ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    alien = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in alien}
    said = folder / "said"  # a file: nobody waits for its end, as for that of a pipe which the second one holds open
    with said.open("w") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,  # and so a group, which the second one is in
        )
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    text = said.read_text()
    assert code == 0, f"{'no end' if code is None else f'ended with {code}'}\n{text[-3000:]}"
    runs = [path.name for path in (folder / "runs").iterdir()]
    assert runs == ["tiny"], "one run, one folder"
    return folder / "runs" / "tiny", text


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a process's group, and take note of its own end."""
    with contextlib.suppress(ProcessLookupError):  # the last of them has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight; not a number where one is none."""
    assert one.keys() == other.keys()
    return float(torch.stack([(one[name].double() - other[name].double()).abs().max() for name in one]).max())


def numbers(run: Path) -> dict[str, float]:
    """A run's last metrics, of those that tell of all batches and not of one process and its time."""
    last = {key: float(value) for row in read_metrics(run) for key, value in row.items() if value}
    kinds = ("train/loss", "train/alpha", "train/greedy", "val/")
    return {key: last[key] for key in last if key.startswith(kinds) or key == "train/grad_norm"}


def test_two_processes_take_the_steps_of_one_that_accumulates(tmp_path: Path) -> None:
    two, said = in_two(tmp_path / "two")
    one = in_one(tmp_path / "one", "--trainer.accumulate_grad_batches", "2")
    short = in_one(tmp_path / "short")  # half the batch a step
    assert apart(final_state(one), final_state(two)) < 1e-5
    assert apart(final_state(one), final_state(short)) > 1e-3, "else the comparison cannot tell"
    assert len(numbers(one)) > 10
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-5)
    assert numbers(short) != pytest.approx(numbers(one), rel=1e-3)
    tokens = [json.loads((run / "run.json").read_text())["tokens_trained"] for run in (one, two, short)]
    assert tokens[0] == tokens[1] > tokens[2]
    assert said.count(f"run {two}: ") == said.count("best heads: ") == 1, "one process speaks"
    assert (two / "config.yaml").is_file()
    assert (two / "heads").is_dir()
