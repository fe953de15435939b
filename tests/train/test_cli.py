"""`mtp-train` through its command line on tiny bases: records, resuming, kills, and bad input."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Timer

from mtp.hub import load_heads
from tests.tiny import tiny_base
from tests.train.runs import job, read_metrics, train, write_data, write_prompts
from tests.train.wandb_records import history
from train.cli import main


def final_state(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    state: dict[str, torch.Tensor] = checkpoint["state_dict"]
    return state


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_a_run_leaves_heads_records_and_provenance(kind: str, tmp_path: Path) -> None:
    run = train(tmp_path, model__heads__kind=kind)
    heads = load_heads(run / "heads")
    assert heads.config.kind == kind
    assert heads.config.base.fingerprint == tiny_base("llama", tmp_path).fingerprint()
    assert json.loads((run / "run.json").read_text())["seed"] == 0
    assert (run / "config.yaml").is_file()
    rows = read_metrics(run)
    keys = {key for row in rows for key, value in row.items() if value}
    for prefix in ("train", "val"):
        assert {f"{prefix}/loss", f"{prefix}/accept_len_implied"} <= keys
        assert {f"{prefix}/{name}/{k}" for name in ("alpha", "greedy", "loss", "top_mass") for k in (1, 2)} <= keys
    assert {"decode/accept_len", "decode/accepted/1", "decode/alpha/2", "train/lr", "train/tokens_per_s"} <= keys
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


def test_the_checkpoint_holds_the_heads_only(tmp_path: Path) -> None:
    run = train(tmp_path)
    names = set(final_state(run))
    assert names == {f"heads.{name}" for name in load_heads(run / "heads").state_dict()} | {"running_alpha"}


def test_a_finished_run_can_be_trained_further(tmp_path: Path) -> None:
    """Also past an end that no checkpoint interval falls on: 4 steps, then on to 9."""
    changes = {"run__checkpoint_every": 100, "model__decode__prompts": None}
    whole = train(tmp_path, "--trainer.max_steps", "9", **changes)
    part = train(tmp_path, "--trainer.max_steps", "4", **changes)
    checkpoint = part / "checkpoints" / "last.ckpt"
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 4
    train(tmp_path, "--trainer.max_steps", "9", "--ckpt_path", str(checkpoint), **changes)
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 9
    assert set(final_state(part)) == set(final_state(whole))


def test_a_second_run_gets_its_own_folder(tmp_path: Path) -> None:
    first, second = train(tmp_path), train(tmp_path)
    assert (first.name, second.name) == ("tiny", "tiny-2")
    for name, tensor in final_state(first).items():  # the same seed gives the same heads
        assert torch.equal(tensor, final_state(second)[name]), name


LK = {"kl": 0.0, "lk": 1.0, "ce": 0.1, "final": {"tv": 1.0, "kl": 0.1}, "blend": [0.3, 0.7], "chunk": 16}
RESUMED: dict[str, dict[str, object]] = {
    "plain": {},
    "muon, kept features, packing": {
        "model__optimizer__kind": "muon",
        "model__features": {"keep": True, "top_k": 16},
        "data__packing": True,
        "data__max_length": 120,
    },
    "lk that goes over to tv, accumulated": {"model__loss": LK, "trainer__accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("case", RESUMED)
def test_every_checkpoint_of_a_run_leads_to_the_same_heads(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a run is killed, it goes on from the last checkpoint that was written: each must do, those before
    validations in the middle of an accumulated step and those across the end of an epoch included."""
    changes = {"model__decode__prompts": None, "trainer__val_check_interval": 5, **RESUMED[case]}
    if "model__features" in changes:
        changes["model__features"] = {**RESUMED[case]["model__features"], "dir": str(tmp_path / "kept")}  # type: ignore[dict-item]
    saved: list[Path] = []

    def save(trainer: lightning.Trainer, path: Path, *rest: object, **more: object) -> None:
        written(trainer, path, *rest, **more)
        saved.append(Path(shutil.copy(path, tmp_path / f"{len(saved)}.ckpt")))

    written = lightning.Trainer.save_checkpoint
    monkeypatch.setattr(lightning.Trainer, "save_checkpoint", save)
    steps = ["--trainer.max_steps", "9"]
    expected = final_state(train(tmp_path, *steps, **changes))
    for checkpoint in list(saved):
        if torch.load(checkpoint, weights_only=True)["global_step"] < 9:
            killed = tmp_path / "runs" / checkpoint.stem / "checkpoints" / "last.ckpt"  # as if it had been the last one
            killed.parent.mkdir(parents=True)
            shutil.copy(checkpoint, killed)
            train(tmp_path, *steps, "--ckpt_path", str(killed), **changes)
            resumed = final_state(killed.parent.parent)
            for name, tensor in expected.items():
                assert torch.equal(tensor, resumed[name]), (checkpoint.name, name)
    assert len(saved) > 4


def test_the_clock_stops_between_accumulated_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time that is up in the middle of a step stops after it, so that nothing accumulated is lost."""
    changes = {
        "model__decode__prompts": None,
        "trainer__accumulate_grad_batches": 3,
        "trainer__max_time": "01:00:00:00",
    }
    steps = ["--trainer.max_steps", "5"]
    expected = final_state(train(tmp_path, *steps, **changes))

    def up(timer: Timer, trainer: lightning.Trainer, *_: object, **__: object) -> None:
        trainer.should_stop = (
            trainer.should_stop or trainer.fit_loop.epoch_loop.batch_idx >= 3
        )  # the second step's first

    with monkeypatch.context() as patched:
        patched.setattr(Timer, "on_train_batch_end", up)
        stopped = train(tmp_path, *steps, **changes) / "checkpoints" / "last.ckpt"
    assert torch.load(stopped, weights_only=True)["global_step"] == 2
    train(tmp_path, *steps, "--ckpt_path", str(stopped), **changes)
    resumed = torch.load(stopped, weights_only=True)
    assert resumed["global_step"] == 5
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed["state_dict"][name]), name


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """kill -9 somewhere after the first checkpoint; the resumed run ends where an uninterrupted one does."""
    changes = {"trainer__max_steps": 24, "model__decode__prompts": None, "trainer__val_check_interval": 5}
    expected = final_state(train(tmp_path, **changes))
    command = [sys.executable, "-m", "train", "--config", str(job(tmp_path, run__name="killed", **changes))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "runs" / "killed" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert 2 <= step < 24, "the kill came too late to test anything"
    assert main([*command[3:], "--ckpt_path", str(checkpoint)]) == 0
    resumed = final_state(checkpoint.parent.parent)
    for name, tensor in expected.items():
        assert torch.equal(tensor, resumed[name]), name
    steps = [int(row["step"]) for row in read_metrics(checkpoint.parent.parent) if row.get("train/loss")]
    assert steps[-1] == 24
    assert load_heads(checkpoint.parent.parent / "heads").config.draft_length == 2


def test_ctrl_c_ends_with_130_and_can_be_resumed(tmp_path: Path) -> None:
    arguments = ["--config", str(job(tmp_path, trainer__max_steps=100_000))]
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # Started from a background job, the tests ignore SIGINT, and children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    checkpoint = tmp_path / "runs" / "tiny" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 120
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=240)
    assert process.returncode == 130
    assert b"--ckpt_path" in error
    assert b"Traceback" not in error
    step = torch.load(checkpoint, weights_only=True)["global_step"]
    assert main([*arguments, "--trainer.max_steps", str(step + 2), "--ckpt_path", str(checkpoint)]) == 0


def test_resuming_with_other_heads_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path)
    checkpoint = str(run / "checkpoints" / "last.ckpt")
    assert main(["--config", str(job(tmp_path, model__heads__draft_length=3)), "--ckpt_path", checkpoint]) == 2
    assert "another configuration" in capsys.readouterr().err


def test_wandb_offline_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a key gets an offline run whose own records hold the metrics."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run = train(tmp_path, run__wandb_project="mtp-test", trainer__max_steps=3)
    (path,) = run.glob("wandb/offline-run-*/*.wandb")
    seen = {key: value for row in history(path) for key, value in row.items()}
    assert {"train/loss", "val/alpha/1", "val/alpha/2", "decode/accept_len"} <= set(seen)
    assert seen["trainer/global_step"] == 3


BAD_CONFIGS = {
    "unknown key": ({"model__heads__draft_lenght": 3}, "draft_lenght"),
    "unknown kind": ({"model__heads__kind": "hydra9"}, "kind"),
    "missing base": ({"model__base__name": "no/such-base"}, "no/such-base"),
    "draft length 0": ({"model__heads__draft_length": 0}, "heads.draft_length is 0"),
    "vocabulary too large": ({"model__heads__draft_vocab_size": 1000}, "draft_vocab_size is 1000"),
    "loss weights": ({"model__loss__kl": 0.0}, "loss.kl is 0"),
    "missing data": ({"data__train": "nowhere.jsonl"}, "nowhere.jsonl"),
    "layer": ({"model__heads__feature_layers": [9]}, "feature_layers is [9]"),
    "accelerator": ({"trainer__accelerator": "foo"}, "foo"),
    "steps": ({"trainer__max_steps": -5}, "-5"),
    "run name": ({"run__name": "a/b"}, "run.name"),
    "a logger": ({"trainer__logger": True}, "trainer.logger is given"),
    "missing prompts": ({"model__decode__prompts": "nowhere.jsonl"}, "nowhere.jsonl"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_configs_are_one_line_and_exit_2(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes, message = BAD_CONFIGS[case]
    assert main(["--config", str(job(tmp_path, **changes))]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
    assert not list((tmp_path / "runs").glob("*")), "a run that never started leaves no folder"


def test_missing_config_and_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in capsys.readouterr().err
    assert main(["--config", str(job(tmp_path)), "--ckpt_path", str(tmp_path / "none.ckpt")]) == 2
    assert "none.ckpt" in capsys.readouterr().err


def test_a_damaged_or_foreign_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path)
    checkpoint, config = run / "checkpoints" / "last.ckpt", (run / "config.yaml").read_text()
    other = ["--config", str(job(tmp_path, model__heads__draft_length=3))]
    data = checkpoint.read_bytes()
    for content in (data[: len(data) // 2], b"", b'{"prompt": "no checkpoint"}'):
        checkpoint.write_bytes(content)
        assert main([*other, "--ckpt_path", str(checkpoint)]) == 2
        assert "is cut short or no checkpoint" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == config, "a refused resume leaves the run's record alone"


def test_a_bad_data_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job(tmp_path)
    data = write_data(tmp_path / "data.jsonl")
    lines = data.read_text().splitlines()
    lines[4] = lines[4][:-9]
    data.write_text("\n".join(lines))
    assert main(["--config", str(path)]) == 2
    assert "data.jsonl:5" in capsys.readouterr().err


def test_regenerate_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job(tmp_path)
    arguments = ["regenerate", "--base", str(tmp_path / "llama"), "--prompts", str(write_prompts(tmp_path / "p.jsonl"))]
    arguments += ["--out", str(tmp_path / "out.jsonl"), "--max-new-tokens", "6", "--batch-size", "4"]
    assert main([*arguments, "--limit", "4"]) == 0
    assert main(arguments) == 0
    assert "4 answers written, 4 already there" in capsys.readouterr().out.replace("\n", " ")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 8
    assert main([*arguments, "--temperature", "-1"]) == 2
    assert "--temperature" in capsys.readouterr().err
    assert main([*arguments[:3], "--prompts", "nowhere", "--out", "x"]) == 2
