"""A run's own folder: what it was asked, with which versions, and who records it.

Knows: the layout below `runs/<name>` (config.yaml, run.json, checkpoints/, heads/, csv/, wandb/), and which loggers to
attach. Refuses to know: models, data and metrics.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from decode.stats import DecodeStats
from decode.trace import TracedText
from decode.wandb_media import media
from decode.wandb_run import WandbRun, start_run
from mtp.card import check_license
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
        license: of the trained heads, for their card, as the Hub spells it (`apache-2.0`); null states none.
        verbosity: quiet (warnings, errors, and where the heads are), normal, or verbose (what Lightning says, too).
    """

    name: str = "run"
    dir: str = "runs"
    checkpoint_every: int = 100
    wandb_project: str | None = "mtp"
    license: str | None = None
    verbosity: Literal["quiet", "normal", "verbose"] = "normal"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise UserError(f"run.name is {self.name!r}; use a plain folder name such as 'demo'.")
        if self.checkpoint_every < 1:
            raise UserError(f"run.checkpoint_every is {self.checkpoint_every}; it must be at least 1.")
        if self.license is not None:
            check_license(self.license, "run.license")


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


def lost(folder: Path) -> str:
    """How to resume a run that was broken off, for the end of a message."""
    path = folder / "checkpoints" / "last.ckpt"
    if not path.is_file() and not first_process():  # which may write on another machine
        return f"if there is a {path}, the same command with --ckpt_path {path} goes on, on any devices"
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


def tell(text: str) -> None:
    """A line to whoever runs the program; standard output is for results."""
    print(text, file=sys.stderr)


class RunRecords(WandbLogger):
    """Lightning's logger over a run that survives whatever becomes of wandb."""

    def __init__(self, records: WandbRun) -> None:
        super().__init__(experiment=records.run)
        self.records = records

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.records.guard(lambda: super(RunRecords, self).log_metrics(metrics, step))

    def log_decoded(self, stats: DecodeStats, texts: Sequence[TracedText], step: int) -> None:
        """What a validation decoded, as tables, coloured samples and a histogram."""
        self.records.guard(lambda: self.records.log({**media(stats, texts), "trainer/global_step": step}))


def make_loggers(
    options: RunOptions, folder: Path, config: dict[str, Any], say: Callable[[str], None] = tell
) -> list[Logger]:
    """A CSV log always; wandb online when a key is configured and it answers, and an offline run otherwise."""
    loggers: list[Logger] = [CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)]
    if options.wandb_project and first_process():
        records = start_run(options.wandb_project, folder.name, folder, config, os.environ, say, "train")
        if records is not None:
            loggers.append(RunRecords(records))
            for group in ("train", "val", "decode"):  # after the logger, which sets an axis of its own
                records.define_axis(f"{group}/*", "trainer/global_step")
    return loggers


def wandb_folder(folder: Path) -> Path | None:
    """The newest wandb run below a run's folder."""
    found = sorted((folder / "wandb").glob("*run-*"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def finish_wandb(loggers: Sequence[Logger]) -> None:
    """Write out and close the wandb run, so that the next run of this process gets its own."""
    for logger in loggers:
        if isinstance(logger, RunRecords):
            logger.records.finish()


def interactive() -> bool:
    """Whether people watch: progress bars are for terminals only."""
    return sys.stderr.isatty() and sys.stdout.isatty()
