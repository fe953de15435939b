"""A run's own folder: what it was asked, with which versions, and who records it.

Knows: the layout below `runs/<name>` (config.yaml, run.json, checkpoints/, heads/, csv/, wandb/), and which loggers to
attach. Refuses to know: models, data and metrics.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import wandb
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from mtp.errors import UserError

PACKAGES = ("mtp-heads", "torch", "lightning", "transformers", "datasets", "wandb")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Where a run is kept and how often it saves.

    Args:
        name: of the run; its folder is `<dir>/<name>`, or `<dir>/<name>-2` and so on where that exists.
        dir: folder of all runs.
        checkpoint_every: optimiser steps between checkpoints: what a killed run can lose.
        wandb_project: project in Weights & Biases; null turns wandb off.
    """

    name: str = "run"
    dir: str = "runs"
    checkpoint_every: int = 100
    wandb_project: str | None = "mtp"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"run.name is {self.name!r}; use a plain folder name such as 'demo'.")
        if self.checkpoint_every < 1:
            raise UserError(f"run.checkpoint_every is {self.checkpoint_every}; it must be at least 1.")


def first_process() -> bool:
    """Whether this is the process of a run that writes and tells, known before there is a trainer."""
    return bool(rank_zero_only.rank == 0)


def run_folder(options: RunOptions, checkpoint: Path | None) -> Path:
    """The folder of a new run, created; or, when resuming, the folder that the checkpoint lies in.

    Of several processes the first decides and makes it. The others write nothing, and for them it is only a name."""
    if checkpoint is not None:
        check_checkpoint(checkpoint)
        return checkpoint.resolve().parent.parent
    if not first_process():
        return Path(options.dir) / options.name
    for number in range(1, 10_000):
        folder = Path(options.dir) / (options.name if number == 1 else f"{options.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"run.dir {options.dir}: {error.strerror}; name a folder that can be written.") from None
        return folder
    raise UserError(f"run.name {options.name}: too many runs of that name in {options.dir}; use another name.")


def how_to_go_on(folder: Path) -> str:
    """How to resume a run that was broken off, for the end of a message."""
    if not first_process():
        return "the first process says how to go on"
    path = folder / "checkpoints" / "last.ckpt"
    if not path.is_file():
        return "there is no checkpoint yet, so start again (run.checkpoint_every says how often one is written)"
    step = torch.load(path, map_location="cpu", weights_only=True, mmap=True)["global_step"]
    return f"nothing before step {step} is lost: the same command with --ckpt_path {path} goes on, on any devices"


def check_checkpoint(path: Path) -> None:
    """UserError unless the file can be read whole as a checkpoint of this program."""
    if not path.is_file():
        raise UserError(f"--ckpt_path {path} is not a file; name runs/<name>/checkpoints/last.ckpt.")
    try:
        whole = "heads_config" in torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # what torch raises for files that are cut short or something else is open-ended
        whole = False
    if not whole:
        raise UserError(f"--ckpt_path {path} is cut short or no checkpoint of mtp-train; name another, or start anew.")


@rank_zero_only
def write_provenance(folder: Path, seed: int | None, command: list[str]) -> None:
    """run.json: versions, seed, git revision and command, for whoever reads the numbers later."""
    document = {
        "command": command,
        "seed": seed,
        "git_revision": git_revision(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    _write_record(folder, document)


@rank_zero_only
def write_outcome(folder: Path, outcome: dict[str, Any]) -> None:
    """Add to run.json what training has come to. Its key `tokens_trained` says that the run is finished."""
    _write_record(folder, {**read_record(folder), **outcome})


def read_record(folder: Path) -> dict[str, Any]:
    """run.json; empty where there is none that can be read."""
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_record(folder: Path, document: dict[str, Any]) -> None:
    part = folder / "run.json.part"
    part.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    part.replace(folder / "run.json")


def git_revision() -> str | None:
    """The checkout's revision, `-dirty` when there are changes; None outside git."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def make_loggers(options: RunOptions, folder: Path, config: dict[str, Any]) -> list[Logger]:
    """A CSV log always; wandb online when a key is configured, and an offline run otherwise."""
    loggers: list[Logger] = [CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)]
    if options.wandb_project and first_process():
        run = wandb.init(
            project=options.wandb_project,
            name=folder.name,
            dir=folder,
            mode="online" if wandb_online(os.environ) else "offline",
            config=config,
            settings=wandb.Settings(silent=True),  # a run says itself where its records are
        )
        loggers.append(WandbLogger(experiment=run))
        for group in ("train", "val", "decode"):  # after the logger, which sets an axis of its own
            run.define_metric(f"{group}/*", step_metric="trainer/global_step")
    return loggers


def wandb_online(environ: Mapping[str, str]) -> bool:
    """Whether wandb may be used online without asking anybody: a key is configured and the mode does not forbid it."""
    if environ.get("WANDB_MODE", "online") != "online":
        return False
    if environ.get("WANDB_API_KEY"):
        return True
    import netrc  # only here: most machines have no such file

    host = environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    path = Path(environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def wandb_folder(folder: Path) -> Path | None:
    """The newest wandb run below a run's folder."""
    found = sorted((folder / "wandb").glob("*run-*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def finish_wandb(loggers: Sequence[Logger]) -> None:
    """Write out and close the wandb run, so that the next run of this process gets its own."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()


def interactive() -> bool:
    """Whether people watch: progress bars are for terminals only."""
    return sys.stderr.isatty() and sys.stdout.isatty()
