"""Two processes train what one does: the same steps from the same batches, whoever holds which half, and whether base
and heads are whole on both (ddp) or spread (fsdp). One that is lost ends the run, which goes on anywhere."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from mtp.errors import UserError
from mtp.hub import load_heads
from tests.train.ranks import Ranks
from tests.train.runs import job, read_metrics, train
from tests.train.test_cli import final_state
from train.prepare import idle_warning
from train.processes import Processes, chosen_strategy

CHANGES: dict[str, Any] = {
    "data__batch_size": 2,
    "trainer__max_steps": 3,
    "trainer__log_every_n_steps": 3,
}
PATIENCE = 600.0  # seconds for two processes; about twenty where nothing else runs, and most of them are imports


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


# 26 examples in 13 batches, so that one of two processes has none left in every seventh step; of 5 validation batches
# likewise. Eight steps go past the end of an epoch. At a rate of 0.01 the 1e-7 between two orders of a sum can grow to
# 1e-3 in the gradient's norm over these steps.
UNEVEN: dict[str, Any] = {
    "data__batch_size": 2,
    "data__val_size": 10,
    "model__optimizer__lr": 1e-3,
    "trainer__max_steps": 8,
    "trainer__log_every_n_steps": 4,
    "trainer__val_check_interval": 6,
    "run__checkpoint_every": 4,
}
TWICE = ["--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "12"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run that one process does, of twice the batches."""
    folder = tmp_path_factory.mktemp("alone")
    return train(folder, *TWICE, **UNEVEN)


def in_ranks(ranks: Ranks, folder: Path, strategy: str, **changes: Any) -> tuple[Path, str]:
    """As `in_two`, started as by torchrun."""
    arguments = ["--config", str(job(folder, **(UNEVEN | changes))), "--trainer.devices", "2"]
    said = ranks.run([*arguments, "--trainer.strategy", strategy], folder / "said")
    (run,) = (folder / "runs").iterdir()
    return run, said


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of any weight; not a number where one is none."""
    assert one.keys() == other.keys()
    return float(torch.stack([(one[name].double() - other[name].double()).abs().max() for name in one]).max())


def numbers(run: Path) -> dict[str, float]:
    """A run's last metrics, of those that tell of all batches and not of one process and its time."""
    last = {key: float(value) for row in read_metrics(run) for key, value in row.items() if value}
    kinds = ("train/loss", "train/alpha", "train/greedy", "val/", "decode/a")
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


STRATEGIES = ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)]  # a test above has ddp


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_uneven_shares_change_nothing(strategy: str, ranks: Ranks, alone: Path, tmp_path: Path) -> None:
    """And a sharded base and spread heads train the same, decode the same, and leave the files of one process."""
    run, said = in_ranks(ranks, tmp_path, strategy)
    assert apart(final_state(alone), final_state(run)) < 1e-5
    assert len(numbers(alone)) > 10
    assert numbers(run) == pytest.approx(numbers(alone), rel=1e-5)
    one, two = (json.loads((folder / "run.json").read_text()) for folder in (alone, run))
    assert one["tokens_trained"] == two["tokens_trained"]
    for name in ("decode/accept_len", "decode/alpha/1", "val/loss"):
        assert two["best"][name] == pytest.approx(one["best"][name], rel=1e-5)
    heads = load_heads(run / "heads")
    assert heads.config.base.fingerprint == load_heads(alone / "heads").config.base.fingerprint
    assert apart(heads.state_dict(), load_heads(alone / "heads").state_dict()) < 1e-5
    assert "on each of 2 devices" in said
    assert said.count("self-test: ") == 5


def test_other_seeds_and_local_means_differ(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: another order of the data, and each batch divided by its own count, come out elsewhere."""
    other = train(tmp_path, *TWICE, "--data.seed", "1", **UNEVEN)
    assert apart(final_state(alone), final_state(other)) > 1e-3
    from train.module import HeadsModule

    step = HeadsModule.training_step

    def local(self: HeadsModule, batch: Any, index: int) -> torch.Tensor:
        return step(self, batch, index) / batch["supervised"].sum() * 10

    monkeypatch.setattr(HeadsModule, "training_step", local)
    other = train(tmp_path, *TWICE, run__name="local", **UNEVEN)
    assert apart(final_state(alone), final_state(other)) > 1e-4


def test_each_writes_its_share_of_the_features_and_reads_what_it_needs(ranks: Ranks, tmp_path: Path) -> None:
    """80 examples are two files, of which each process writes one; with a seed of its own each reads from both."""
    lines = [{"prompt": f"what is {i}?", "response": f"it is the number {i} and a cat"} for i in range(80)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    kept = {"model__features__keep": True, "data__train": str(tmp_path / "many.jsonl"), "trainer__max_steps": 6}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    one = train(folders[0], *TWICE, **(UNEVEN | kept | {"model__features__dir": str(folders[0] / "features")}))
    changes = kept | {"model__features__dir": str(folders[1] / "features")}
    two, _ = in_ranks(ranks, folders[1], "ddp", **changes)
    shards = [sorted(path.name for path in folder.rglob("features/*/*.safetensors")) for folder in folders]
    assert len(shards[0]) == 2
    assert shards[0] == shards[1]
    assert apart(final_state(one), final_state(two)) < 1e-5


def late() -> None:
    """In each of two processes, of which the first is slow: what waits for preparation, and what waits for a step."""
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, barebones=True)
    processes = Processes(trainer)
    processes.join(lightning.LightningModule(), print)
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    time.sleep(4 if processes.rank == 0 else 0)
    processes.wait()
    print("WAITED", flush=True)
    time.sleep(4 if processes.rank == 0 else 0)
    try:
        dist.barrier(group=impatient)
    except RuntimeError:
        print("GAVE UP", flush=True)


def test_who_prepares_longer_than_a_step_may_take_is_waited_for(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks.run(["tests.train.test_two_processes:late"], tmp_path / "said")
    assert said.count("WAITED") == 2
    assert "GAVE UP" in said, "the control: a step would not have waited"


# A small learning rate: where gradients are spread, the norm that clips them is summed in another order, and at
# 0.01 the 1e-7 between two orders has grown to 6e-5 after 12 steps and 4e-2 after 60.
LONG: dict[str, Any] = {
    "model__decode__prompts": None,
    "model__optimizer__lr": 3e-4,
    "data__batch_size": 2,
    "trainer__max_steps": 60,
    "trainer__val_check_interval": 1000,
    "trainer__log_every_n_steps": 20,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_process_ends_the_run_which_goes_on_anywhere(strategy: str, ranks: Ranks, tmp_path: Path) -> None:
    config = str(job(tmp_path, **LONG))
    two = ["--config", config, "--trainer.devices", "2", "--trainer.strategy", strategy]
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    pids = ranks.start(two, tmp_path / "said")
    deadline = time.monotonic() + PATIENCE
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    os.kill(pids[1], signal.SIGKILL)
    killed = time.monotonic()
    codes = ranks.codes()
    said = (tmp_path / "said").read_text()
    assert codes == [2, -signal.SIGKILL], said[-3000:]
    assert time.monotonic() - killed < 60
    left = torch.load(checkpoint, weights_only=True)
    assert 3 <= left["global_step"] < 60, "else there is nothing to resume"
    (told,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert "another process of this run ended" in told
    assert f"--ckpt_path {checkpoint} goes on" in told
    copy = tmp_path / "copy" / "tiny" / "checkpoints" / "last.ckpt"
    shutil.copytree(checkpoint.parent.parent, copy.parent.parent)
    whole = train(tmp_path, "--trainer.accumulate_grad_batches", "2", run__name="whole", **LONG)
    ranks.run([*two, "--ckpt_path", str(checkpoint)], tmp_path / "said again")
    train(tmp_path, "--trainer.accumulate_grad_batches", "2", "--ckpt_path", str(copy), **LONG)
    for resumed in (checkpoint, copy):
        found = torch.load(resumed, weights_only=True)
        assert found["global_step"] == 60
        assert apart(found["state_dict"], final_state(whole)) < 1e-4
    assert apart(left["state_dict"], final_state(whole)) > 1e-3, "the control: what was left to train matters"


@pytest.mark.parametrize(
    "value",
    [name for name in StrategyRegistry.available_strategies() if re.match("ddp_(spawn|fork|notebook)", name)]
    + [DDPStrategy(start_method="spawn"), DDPStrategy(start_method="fork")],
)
def test_processes_that_are_no_command_lines_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"trainer.strategy is .*allowed is ddp, fsdp or auto; use ddp"):
        chosen_strategy(value)


def test_other_strategies_are_taken_as_they_are() -> None:
    for value in ("auto", "ddp", "ddp_find_unused_parameters_true", DDPStrategy()):
        assert chosen_strategy(value) is value


def test_what_auto_means_in_a_notebook_is_refused() -> None:
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp_notebook", logger=False, barebones=True)
    with pytest.raises(UserError, match="start mtp-train from a command line, or set trainer.devices 1"):
        Processes(trainer).join(lightning.LightningModule(), print)


def test_processes_without_a_batch_are_warned_of() -> None:
    told = idle_warning(1, 3, 4)
    assert told is not None
    assert "fewer batches (1) than there are processes (3): 2 of them will have none" in told
    assert "use fewer (trainer.devices, trainer.num_nodes), lower data.batch_size (4), or give more data" in told
    assert "batch_size" not in str(idle_warning(1, 2, 1)), "which cannot be lower"
    assert idle_warning(2, 2, 4) is None


@pytest.mark.slow
def test_one_batch_for_two_is_told_before_the_first_step_and_the_card_counts_both(ranks: Ranks, tmp_path: Path) -> None:
    changes = LONG | {"data__batch_size": 100, "data__packing": True, "trainer__max_steps": 1, "data__val_size": 0}
    config = str(job(tmp_path, **(changes | {"data__limit": 3})))
    said = ranks.run(["--config", config, "--trainer.devices", "2", "--trainer.strategy", "ddp"], tmp_path / "said")
    warning = "warning: an epoch has fewer batches (1) than there are processes (2): 1 of them will have none"
    assert said.count(warning) == 1, "one process speaks"
    assert said.index(warning) < said.index("before the first step")
    card = (tmp_path / "runs" / "tiny" / "heads" / "README.md").read_text()
    assert "| rows in a batch | 200, 100 on each of 2 devices |" in card


ENDLESS = LONG | {"trainer__max_steps": 10**6}


def begun(ranks: Ranks, folder: Path, strategy: str) -> tuple[list[int], Path]:
    """Two processes of a run that would never end, with a checkpoint; their ids, and the checkpoint."""
    two = ["--trainer.devices", "2", "--trainer.strategy", strategy]
    pids = ranks.start(["--config", str(job(folder, **ENDLESS)), *two], folder / "said")
    checkpoint = folder / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + PATIENCE
    while not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    return pids, checkpoint


@pytest.mark.parametrize(
    ("victim", "strategy"),
    [(0, "ddp"), (1, "ddp"), *(pytest.param(victim, "fsdp", marks=pytest.mark.slow) for victim in (0, 1))],
)
def test_a_process_that_is_told_to_end_ends_the_run(victim: int, strategy: str, ranks: Ranks, tmp_path: Path) -> None:
    """SIGTERM to one while the other waits for it, or it for the other. Both say how to go on."""
    pids, checkpoint = begun(ranks, tmp_path, strategy)
    os.kill(pids[victim], signal.SIGTERM)
    told = time.monotonic()
    codes = ranks.codes()
    said = (tmp_path / "said").read_text()
    assert codes == [2, 2], said[-3000:]
    assert time.monotonic() - told < 60
    assert "Traceback" not in said
    errors = sorted(line for line in said.splitlines() if line.startswith("error: "))
    assert len(errors) == 2, "one of each"
    assert errors[0].startswith("error: another process of this run ended")
    assert errors[1].startswith(f"error: process {victim} of 2 (PID {pids[victim]}) was told to end by SIGTERM")
    assert all(f"--ckpt_path {checkpoint} goes on" in line for line in errors)


@pytest.mark.parametrize("late", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_who_is_told_to_end_because_another_was_lost_still_says_how_to_go_on(
    late: float, ranks: Ranks, tmp_path: Path
) -> None:
    """As torchrun does: one is killed, and the others get SIGTERM while they notice. So does the second of two."""
    pids, checkpoint = begun(ranks, tmp_path, "ddp")
    os.kill(pids[0], signal.SIGKILL)
    time.sleep(late)
    os.kill(pids[1], signal.SIGTERM)
    codes = ranks.codes()
    said = (tmp_path / "said").read_text()
    assert codes == [-signal.SIGKILL, 2], said[-3000:]
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert f"--ckpt_path {checkpoint} goes on" in error
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_process_that_waits_for_one_that_is_stuck_can_be_told_to_end(ranks: Ranks, tmp_path: Path) -> None:
    """Its main thread is in foreign code, where no handler of Python's runs."""
    pids, checkpoint = begun(ranks, tmp_path, "ddp")
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(2)
    os.kill(pids[0], signal.SIGTERM)
    deadline = time.monotonic() + 60
    while not ended(pids[0]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ended(pids[0])
    os.kill(pids[1], signal.SIGKILL)
    assert ranks.codes() == [2, -signal.SIGKILL]
    said = (tmp_path / "said").read_text()
    assert "process 0 of 2" in said
    assert "was told to end by SIGTERM; nothing before step" in said
    assert f"--ckpt_path {checkpoint} goes on" in said


@pytest.mark.slow
def test_spread_heads_resume_alone_and_alone_ones_spread(ranks: Ranks, tmp_path: Path) -> None:
    """Muon, whose steps need whole matrices, and a stream of data, on either side of a change of hands."""
    changes = LONG | {"model__optimizer__kind": "muon", "trainer__max_steps": 12, "run__checkpoint_every": 6}
    changes |= {"data__streaming": True, "data__stream_buffer": 10, "data__stream_sample": 20}
    half = changes | {"trainer__max_steps": 6}
    schedule = {"model__optimizer__warmup": 0.0, "model__optimizer__decay": 0.0}
    whole = train(tmp_path, "--trainer.accumulate_grad_batches", "2", run__name="flat", **(changes | schedule))
    spread = ["--trainer.devices", "2", "--trainer.strategy", "fsdp"]
    ranks.run(["--config", str(job(tmp_path, run__name="spread", **(half | schedule))), *spread], tmp_path / "said")
    checkpoint = tmp_path / "runs" / "spread" / "checkpoints" / "last.ckpt"
    resume = ["--ckpt_path", str(checkpoint)]
    train(tmp_path, "--trainer.accumulate_grad_batches", "2", *resume, **(changes | schedule))
    assert apart(final_state(checkpoint.parent.parent), final_state(whole)) < 1e-4
    train(tmp_path, "--trainer.accumulate_grad_batches", "2", run__name="alone", **(half | schedule))
    checkpoint = tmp_path / "runs" / "alone" / "checkpoints" / "last.ckpt"
    config = str(job(tmp_path, **(changes | schedule)))
    ranks.run(["--config", config, *spread, "--ckpt_path", str(checkpoint)], tmp_path / "said")
    assert apart(final_state(checkpoint.parent.parent), final_state(whole)) < 1e-4


def ended(pid: int) -> bool:
    """Also where nobody has taken note of it."""
    try:
        return ") Z" in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victim", ["first", "second"])
def test_no_process_of_a_launched_run_outlives_a_lost_one(victim: str, sign: int, tmp_path: Path) -> None:
    """Here one process starts the other, and each looks after the other."""
    command = [sys.executable, "-m", "train", "--config", str(job(tmp_path, **ENDLESS))]
    command += ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
    checkpoint, said = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt", tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while not checkpoint.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        (child,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(process.pid if victim == "first" else child, sign)
        if victim == "second" or sign == signal.SIGTERM:
            assert process.wait(60) == 2
            assert f"process {int(victim == 'second')} of 2 (PID" in said.read_text()
            how = "killed by SIGKILL" if sign == signal.SIGKILL else "told to end by SIGTERM"
            assert f"was {how}" in said.read_text()
            assert f"--ckpt_path {checkpoint} goes on" in said.read_text()
        deadline = time.monotonic() + 60
        while not ended(child) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ended(child)
    finally:
        end_group(process)
