"""`mtp-train`: train heads from one YAML file, look at its data, or let the base write them.

Knows: command lines, consoles and exit codes: 0 done, 2 bad input, 130 interrupted.
Refuses to know: how training works; it connects the parts.
"""

import contextlib
import json
import logging
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
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console

from mtp.embedded import default_home
from mtp.errors import UserError
from train.callbacks import ConsoleReport, ExportHeads, LastCheckpoint, Tally
from train.data import ChatDataModule
from train.inspect import coloured, inspect_data, lines
from train.module import HeadsModule
from train.prepare import prepare
from train.processes import Processes, chosen_strategy
from train.regenerate_cli import run_regenerate
from train.run import (
    RunOptions,
    finish_wandb,
    first_process,
    how_to_go_on,
    interactive,
    make_loggers,
    run_folder,
    write_outcome,
    write_provenance,
)

BAD_INPUT, INTERRUPTED = 2, 130
DESCRIPTION = """Train heads from a YAML file: mtp-train --config configs/demo.yaml.
Look at its data without training: mtp-train inspect --config configs/demo.yaml.
Let the base write training data: mtp-train regenerate --help.
Train several architectures and compare them: mtp-train compare --help."""
TRAINER_DEFAULTS = {
    "max_epochs": 1,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": None,  # val_check_interval counts batches across epochs
    "log_every_n_steps": 10,
    "gradient_clip_val": 1.0,
    "use_distributed_sampler": False,  # the loaders know their rank
    "enable_model_summary": False,
}


class TrainCLI(LightningCLI):
    """LightningCLI without subcommands: model, data, trainer, plus `run` and `--ckpt_path`."""

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
                strategy=chosen_strategy(self.config_init["trainer"]["strategy"]),
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


class InspectCLI(TrainCLI):
    """The same configuration, of which only the data are made: no base, no trainer, no run."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument("--count", type=int, default=3, help="examples to show")
        parser.add_argument("--json", action="store_true", help="the last line of stdout is one JSON document")

    def instantiate_classes(self) -> None:
        self.config_init = self.parser.instantiate_classes(self.config)
        self.model, self.datamodule = self._get(self.config_init, "model"), self._get(self.config_init, "data")


def plain(config: Any) -> Any:
    """A parsed configuration as plain JSON types, for loggers."""
    if isinstance(config, Namespace):
        config = config.as_dict()
    if isinstance(config, dict):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return config if isinstance(config, bool | int | float | str) or config is None else str(config)


def entry() -> None:
    """The console script."""
    sys.exit(main())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        if arguments[:1] == ["regenerate"]:
            run_regenerate(arguments[1:])
        elif arguments[:1] == ["inspect"]:
            run_inspect(arguments[1:])
        elif arguments[:1] == ["compare"]:
            from train.compare_cli import run_compare  # it trains by `fit` below

            run_compare(arguments[1:])
        else:
            fit(arguments)
    except (UserError, ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "make room there, or name a folder that can be written; a run goes on from its last checkpoint"
        print(f"error: {where}{error.strerror or error}; {remedy}.", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        again = arguments[:1] in (["regenerate"], ["compare"])
        resume = "the same command" if again else "--ckpt_path <run>/checkpoints/last.ckpt"
        print(f"\ninterrupted; resume with {resume}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    return 0


def fit(arguments: list[str]) -> Path:
    """Train from a config; returns the run's folder."""
    quiet_lightning()
    cli = parse(arguments)
    processes = Processes(cli.trainer)
    with processes.together(lambda: how_to_go_on(cli.folder)):
        fit_among(processes, cli, arguments)
    write_outcome(cli.folder, outcome(cli))
    conclude(cli)
    return cli.folder


def fit_among(processes: Processes, cli: TrainCLI, arguments: list[str]) -> None:
    """This process's part of a training."""
    checkpoint = cli.config["ckpt_path"]
    cli.model.resuming = checkpoint is not None
    with cli.no_empty_run():
        tell = lambda fault: print(f"error: {fault}; {how_to_go_on(cli.folder)}.", file=sys.stderr, flush=True)  # noqa: E731
        processes.join(cli.model, tell)
        prepare(processes, cli.model, cli.datamodule, cli.folder, default_home(os.environ), cli.console)
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


def parse(arguments: list[str], kind: type[TrainCLI] = TrainCLI) -> TrainCLI:
    """The parsed command line with model, data and trainer made from it."""
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
            parser_kwargs={"prog": "mtp-train", "exit_on_error": False, "description": DESCRIPTION},
        )
    except (UserError, ArgumentError):
        raise
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


def run_inspect(arguments: list[str]) -> None:
    """`mtp-train inspect`: the data of a configuration, without the weights of the base."""
    quiet_lightning()
    cli = parse(arguments, InspectCLI)
    data, count = cli.datamodule, cli.config["count"]
    console = Console(stderr=cli.config["json"], highlight=False, soft_wrap=True, markup=False)
    document = inspect_data(
        data,
        cli.model.base_options,
        cli.model.heads_options.draft_vocab_size,
        default_home(os.environ),
        count=count,
        on_progress=console.print,
    )
    for line in lines(document, data):
        console.print(line)
    for number, example in enumerate(data.sample(count), start=1):
        console.print(f"example {number} ({example.where}), supervised tokens between ⟦ and ⟧:")
        console.print(coloured(example, data))
    if cli.config["json"]:
        print(json.dumps(document, ensure_ascii=False), flush=True)
