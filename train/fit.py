"""`mtp-train --config …`: one training run, from its command line to its last word.

Knows: Lightning's command line, and in which order a run's parts come. Refuses to know: how training works; it connects
the parts.
"""

import contextlib
import logging
import math
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from mtp.embedded import default_home
from mtp.errors import UserError
from train.briefing import acceptance_table, briefing, disk_in_words, next_commands, steps_in_words
from train.callbacks import ConsoleReport, ExportHeads, LastCheckpoint, RunPage, StopBetweenSteps, Tally
from train.card import renew_card
from train.console import warn
from train.data import ChatDataModule
from train.disk import check_disk, estimate_disk
from train.given import check_given, explain
from train.interrupt import command_line, handler_kept, resuming, told
from train.module import HeadsModule
from train.prepare import prepare
from train.processes import Processes, chosen_strategy
from train.progress import TrainingProgress
from train.run import (
    RunOptions,
    finish_wandb,
    first_process,
    interactive,
    lost,
    make_loggers,
    run_folder,
    write_outcome,
    write_provenance,
)
from train.schema import TRAINER_DEFAULTS, schema
from train.stream import BadRecord

ALIASES = {"--quiet": ("--run.verbosity", "quiet"), "--verbose": ("--run.verbosity", "verbose")}


class TrainCLI(LightningCLI):
    """LightningCLI without subcommands: model, data, trainer, plus `run` and `--ckpt_path`."""

    options: tuple[str, ...] = ("config", "ckpt_path", "print_config!", "help!", "h!")  # see `train.given`

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_class_arguments(RunOptions, "run")
        parser.add_argument("--ckpt_path", type=Path | None, default=None, help="checkpoint to resume from")
        parser.set_defaults({"data.cache_dir": str(default_home(os.environ) / "tokens")})

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        """The trainer with this run's folder, loggers and callbacks."""
        options: RunOptions = self.config_init["run"]
        given = self.config_init["trainer"]
        if given["logger"]:
            raise UserError(
                "trainer.logger is given, and a run attaches its own: remove it; see run.wandb_project, and the run's "
                "metrics.csv, which is always written."
            )
        if options.verbosity == "verbose":
            quiet_lightning(logging.INFO)
        self.console = Console(quiet=not first_process() or options.verbosity == "quiet")
        self.console.soft_wrap = not self.console.is_terminal  # a line stays one where programs read it
        self.folder = run_folder(options, self.config["ckpt_path"])
        self.export, self.tally = ExportHeads(self.folder / "heads"), Tally()
        self.page = RunPage(self.folder, self.export, lambda text: warn(self.console, text))
        watched = interactive() and options.verbosity != "quiet" and given["enable_progress_bar"] is not False
        self.progress = TrainingProgress(self.console, watched)
        self.progress.brief = self.brief
        last = LastCheckpoint(self.folder, options.checkpoint_every)
        ours = [
            last,
            StopBetweenSteps(last, self.progress.say),
            self.export,
            self.progress,
            ConsoleReport(self.console),
            self.page,
            self.tally,
        ]
        with self.no_empty_run():
            return super().instantiate_trainer(
                strategy=chosen_strategy(given["strategy"]),
                logger=False,  # attached when base and data are known to be good
                callbacks=[*(self.config_init["trainer"]["callbacks"] or []), *ours],
                enable_progress_bar=False,  # the run has one of its own
                **kwargs,
            )

    def brief(self, trainer: lightning.Trainer, model: HeadsModule) -> list[str]:
        """The summary before the first step; UserError where the disk has no room for the run."""
        data, heads = self.datamodule, model.trained
        steps, rows = float(trainer.estimated_stepping_batches), data.batch_size * trainer.accumulate_grad_batches
        told = steps_in_words(steps, trainer.global_step, rows * trainer.world_size, epoch_of(trainer))
        disk = estimate_disk(
            sum(p.numel() for p in heads.parameters()),
            sum(b.numel() * b.element_size() for b in heads.buffers()),
            2 if model.optimizer_options.kind == "adamw" else 1,
            int(min(steps, 1e6)) // max(1, trainer.log_every_n_steps) + 2,
            heads.config.draft_length,
            0 if model.store is None else model.store.size(),
        )
        place = disk_in_words(disk, check_disk(disk, self.folder))
        return briefing(heads, model.base, data.train_report, told, model.memory_told, place)

    @contextlib.contextmanager
    def no_empty_run(self) -> Iterator[None]:
        """A new run that fails in here leaves no folder: nothing was trained."""
        try:
            yield
        except BaseException:  # Ctrl-C too
            if self.config["ckpt_path"] is None and first_process():
                shutil.rmtree(self.folder)
            raise


def epoch_of(trainer: lightning.Trainer) -> float:
    """Optimiser steps in an epoch."""
    return math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)


def plain(config: Any) -> Any:
    """A parsed configuration as plain JSON types, for loggers."""
    if isinstance(config, Namespace):
        config = config.as_dict()
    if isinstance(config, dict):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return config if isinstance(config, bool | int | float | str) or config is None else str(config)


def fit(arguments: list[str]) -> Path:
    """Train from a config; returns the run's folder."""
    quiet_lightning()
    arguments = [word for given in arguments for word in ALIASES.get(given, (given,))]
    cli = parse(arguments)
    processes = Processes(cli.trainer)
    with processes.together(lambda: lost(cli.folder)), told(lambda: how_to_go_on(cli, arguments)):
        fit_among(processes, cli, arguments)
    write_outcome(cli.folder, outcome(cli))
    if first_process():
        renew_card(cli.folder)
        cli.page.conclude()
    conclude(cli)
    return cli.folder


def fit_among(processes: Processes, cli: TrainCLI, arguments: list[str]) -> None:
    """This process's part of a training."""
    checkpoint = cli.config["ckpt_path"]
    cli.model.resuming = checkpoint is not None
    with cli.no_empty_run():
        tell = lambda fault: print(f"error: {fault}; {lost(cli.folder)}.", file=sys.stderr, flush=True)  # noqa: E731
        processes.join(cli.model, tell)
        cli.folder = Path(processes.share(str(cli.folder)))  # so that every process can say how to go on
        prepare(processes, cli.model, cli.datamodule, cli.folder, default_home(os.environ), cli.console)
    if checkpoint is None:  # a resumed run keeps the record of its start
        write_config(cli)
        write_provenance(cli.folder, cli.config["seed_everything"], ["mtp-train", *arguments])
    write_outcome(cli.folder, {"devices": cli.trainer.world_size})  # of this sitting
    cli.trainer.loggers = make_loggers(cli.config_init["run"], cli.folder, plain(cli.config))
    train(cli, checkpoint)


def train(cli: TrainCLI, checkpoint: Path | None) -> None:
    """The steps, from the first or from a checkpoint."""
    try:
        with handler_kept():
            cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint and str(checkpoint), weights_only=True)
    except BadRecord as error:  # of a stream; elsewhere all records are read before the first step
        raise UserError(f"{error} Leave the records before it as they are; {lost(cli.folder)}.") from error
    except SystemExit:
        if cli.trainer.interrupted:  # Lightning turns Ctrl-C into an exit
            raise KeyboardInterrupt from None
        raise
    finally:
        finish_wandb(cli.trainer.loggers)


def how_to_go_on(cli: TrainCLI, arguments: Sequence[str]) -> str:
    """After Ctrl-C: from the last checkpoint, or from the start where there is none; then no run is left behind."""
    last = cli.folder / "checkpoints" / "last.ckpt"
    checkpoint = last if last.is_file() else cli.config["ckpt_path"] or last
    if checkpoint.is_file():
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)["global_step"]
        return f"{saved} steps are saved. Go on with\n{resuming(arguments, checkpoint)}"
    if first_process() and not (cli.folder / "wandb").is_dir():  # whose records the run has just said how to send
        shutil.rmtree(cli.folder, ignore_errors=True)
    return f"no step was saved, tokens and features are kept. Start again with\n{command_line(arguments)}"


def parse(arguments: list[str], kind: type[TrainCLI] = TrainCLI) -> TrainCLI:
    """The parsed command line with model, data and trainer made from it."""
    given = check_given(arguments, schema(), kind.options)
    try:
        return kind(
            HeadsModule,
            ChatDataModule,
            run=False,
            args=arguments,
            save_config_callback=None,
            seed_everything_default=0,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            trainer_defaults=TRAINER_DEFAULTS,
            parser_kwargs={"prog": "mtp-train", "exit_on_error": False},
        )
    except UserError:
        raise
    except ArgumentError as error:
        raise UserError(explain(error, given, schema())) from None
    except (ValueError, TypeError, MisconfigurationException) as error:
        # Lightning and YAML refuse bad values with exceptions of many kinds; their first line says what is wrong.
        raise UserError(f"the configuration cannot be used: {str(error).strip()}") from error


def outcome(cli: TrainCLI) -> dict[str, Any]:
    """What a finished training came to, for run.json."""
    return {
        "steps": cli.trainer.global_step,
        "tokens_trained": cli.tally.tokens,
        "seconds_training": round(cli.tally.seconds, 3),
        "parameters": sum(p.numel() for p in cli.model.trained.parameters()),
        "device": str(cli.model.base.device),
        "threads": torch.get_num_threads(),
        "best": cli.export.metrics or None,
    }


@rank_zero_only
def write_config(cli: TrainCLI) -> None:
    """config.yaml: every key as resolved."""
    cli.parser.save(cli.config, str(cli.folder / "config.yaml"), overwrite=True, skip_validation=True, multifile=False)


def quiet_lightning(level: int = logging.WARNING) -> None:
    """What Lightning says at every start is for its own developers; warnings stay."""
    logging.getLogger("lightning.pytorch").setLevel(level)
    logging.getLogger("lightning.fabric").setLevel(level)
    for message in (
        "LightningCLI's args",
        ".*LeafSpec",
        ".*exists and is not empty",
        ".*number of training batches",
        ".*sync_dist=True",  # what is logged are sums over all processes
    ):
        warnings.filterwarnings("ignore", message=message)


@rank_zero_only
def conclude(cli: TrainCLI) -> None:
    """Say what came of it, where everything is, and what to do next."""
    heads, say = cli.folder / "heads", cli.console.print
    if not heads.is_dir():
        Console().print(f"no step was taken, so there are no heads; records: {cli.folder}", highlight=False)
        return
    if any(isinstance(one, Timer) and not (one.time_remaining() or 0) > 0 for one in cli.trainer.callbacks):
        warn(cli.console, "trainer.max_time ended the run; a longer one, or null, goes on from its checkpoint.")
    if cli.console.quiet:
        for line in cli.export.verdict():
            if line.startswith("warning"):
                warn(cli.console, line)
        Console().print(f"heads: {heads}", highlight=False, soft_wrap=True)
        return
    told = [
        *cli.export.verdict(),
        *acceptance_table(cli.export.metrics, cli.model.trained.config.draft_length),
        f"heads: {heads}",
        f"metrics: {cli.trainer.loggers[0].log_dir}/metrics.csv",
        f"report: {cli.folder / 'report.html'}",
        "what to do with them:",
        *next_commands(heads, cli.model.trained, cli.model.base, cli.model.decode_options.prompts),
    ]
    for line in told:
        say(line, highlight=False, soft_wrap=True, markup=False)
