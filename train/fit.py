"""`mtp-train --config …`: one training run, from its command line to its last word.

Knows: Lightning's command line, and in which order a run's parts come. Refuses to know: how training works; it connects
the parts.
"""

import contextlib
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from mtp.embedded import default_home
from mtp.errors import UserError
from train.callbacks import ConsoleReport, ExportHeads, LastCheckpoint, Tally
from train.data import ChatDataModule
from train.given import check_given, explain
from train.module import HeadsModule
from train.prepare import prepare
from train.run import (
    RunOptions,
    finish_wandb,
    first_process,
    interactive,
    make_loggers,
    run_folder,
    write_outcome,
    write_provenance,
)
from train.schema import TRAINER_DEFAULTS, schema


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
        self.console = Console(quiet=not first_process())
        self.folder = run_folder(options, self.config["ckpt_path"])
        self.export, self.tally = ExportHeads(self.folder / "heads"), Tally()
        ours = [
            LastCheckpoint(self.folder, options.checkpoint_every),
            self.export,
            ConsoleReport(self.console),
            self.tally,
        ]
        with self.no_empty_run():
            return super().instantiate_trainer(
                logger=False,  # attached when base and data are known to be good
                callbacks=[*(self.config_init["trainer"]["callbacks"] or []), *ours],
                enable_progress_bar=interactive(),
                **kwargs,
            )

    @contextlib.contextmanager
    def no_empty_run(self) -> Iterator[None]:
        """A new run that fails in here leaves no folder: nothing was trained."""
        try:
            yield
        except BaseException:  # Ctrl-C too
            if self.config["ckpt_path"] is None and first_process():
                shutil.rmtree(self.folder)
            raise


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
    cli = parse(arguments)
    checkpoint = cli.config["ckpt_path"]
    cli.model.resuming = checkpoint is not None
    with cli.no_empty_run():
        prepare(cli.trainer, cli.model, cli.datamodule, cli.folder, default_home(os.environ), cli.console)
    if checkpoint is None:  # a resumed run keeps the record of its start
        write_config(cli)
        write_provenance(cli.folder, cli.config["seed_everything"], ["mtp-train", *arguments])
    cli.trainer.loggers = make_loggers(cli.config_init["run"], cli.folder, plain(cli.config))
    try:
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=checkpoint and str(checkpoint), weights_only=True)
    except SystemExit:
        if cli.trainer.interrupted:  # Lightning turns Ctrl-C into an exit
            raise KeyboardInterrupt from None
        raise
    finally:
        finish_wandb(cli.trainer.loggers)
    write_outcome(cli.folder, outcome(cli))
    conclude(cli)
    return cli.folder


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


def quiet_lightning() -> None:
    """What Lightning says at every start is for its own developers; warnings stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
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
    """Say where everything is and what to do next."""
    heads = cli.folder / "heads"
    if not heads.is_dir():
        cli.console.print(f"no step was taken, so there are no heads; records: {cli.folder}", highlight=False)
        return
    for line in cli.export.verdict():
        cli.console.print(line, highlight=False, soft_wrap=True)
    cli.console.print(
        f"heads: {heads}\nmetrics: {cli.trainer.loggers[0].log_dir}/metrics.csv\n"
        f'decode: mtp-decode generate --heads {heads} --prompt "Why is the sky blue?"\n'
        f"bench:  mtp-decode bench --heads {heads} --prompts configs/prompts/demo_heldout.jsonl --limit 8",
        highlight=False,
        soft_wrap=True,
    )
