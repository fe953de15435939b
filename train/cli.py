"""`mtp-train`: train heads from one YAML file, or let the base write the data for it.

Knows: command lines, consoles and exit codes: 0 done, 2 bad input, 130 interrupted.
Refuses to know: how training works; it connects the parts.
"""

import contextlib
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import ArgumentError, ArgumentParser, Namespace
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from train.callbacks import ConsoleReport, ExportHeads, LastCheckpoint
from train.data import ChatDataModule
from train.module import HeadsModule
from train.options import BaseOptions
from train.regenerate import regenerate
from train.run import (
    RunOptions,
    finish_wandb,
    interactive,
    make_loggers,
    run_folder,
    write_provenance,
)

BAD_INPUT, INTERRUPTED = 2, 130
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)
DESCRIPTION = """Train heads from a YAML file: mtp-train --config configs/demo.yaml.
Let the base write training data: mtp-train regenerate --help."""
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

    def instantiate_trainer(self, **kwargs: Any) -> lightning.Trainer:
        """The trainer with this run's folder, loggers and callbacks."""
        options: RunOptions = self.config_init["run"]
        self.console = Console()
        self.folder = run_folder(options, self.config["ckpt_path"])
        ours = [
            LastCheckpoint(self.folder, options.checkpoint_every),
            ExportHeads(self.folder / "heads"),
            ConsoleReport(self.console),
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
        except Exception:
            if self.config["ckpt_path"] is None:
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


def entry() -> None:
    """The console script."""
    sys.exit(main())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        if arguments[:1] == ["regenerate"]:
            run_regenerate(arguments[1:])
        else:
            fit(arguments)
    except (UserError, ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\ninterrupted; resume with --ckpt_path <run>/checkpoints/last.ckpt", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    return 0


def fit(arguments: list[str]) -> Path:
    """Train from a config; returns the run's folder."""
    quiet_lightning()
    cli = parse(arguments)
    checkpoint = cli.config["ckpt_path"]
    with cli.no_empty_run():
        prepare(cli)
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
    conclude(cli)
    return cli.folder


def parse(arguments: list[str]) -> TrainCLI:
    """The parsed command line with model, data and trainer made from it."""
    try:
        return TrainCLI(
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


def write_config(cli: TrainCLI) -> None:
    """config.yaml: every key as resolved."""
    cli.parser.save(cli.config, str(cli.folder / "config.yaml"), overwrite=True, skip_validation=True, multifile=False)


def prepare(cli: TrainCLI) -> None:
    """Load base and data, and show what will be trained on what."""
    base = load_base(cli.model.base_options, str(cli.trainer.strategy.root_device), cli.console)
    cli.model.attach(base)
    cli.datamodule.set_tokenizer(base.tokenizer)
    cli.datamodule.setup("fit")
    cli.model.build(cli.datamodule)
    cli.model.on_start = starting_bar(cli.console)
    introduce(cli, base)


def quiet_lightning() -> None:
    """What Lightning says at every start is for its own developers; warnings stay."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
    for message in ("LightningCLI's args", ".*LeafSpec", ".*exists and is not empty", ".*number of training batches"):
        warnings.filterwarnings("ignore", message=message)


def load_base(options: BaseOptions, device: str, console: Console) -> FrozenBase:
    """The base that the options name, on `device`."""
    return FrozenBase.from_pretrained(
        options.name,
        revision=options.revision,
        dtype=options.dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
        home=default_home(os.environ),
        on_progress=lambda stage: console.print(stage, highlight=False),
    )


def introduce(cli: TrainCLI, base: FrozenBase) -> None:
    """Say what will be trained on what, and show one example with its mask."""
    say, data = cli.console.print, cli.datamodule
    say(
        f"run {cli.folder}: heads for {base.name} ({base.num_layers} layers, {base.dtype}, {base.device})",
        highlight=False,
    )
    say(data.train_report.summary(), highlight=False, markup=False)
    if data.val_report is not None:
        say(f"validation: {data.val_report.summary()}", highlight=False, markup=False)
    say("first example, supervised tokens between ⟦ and ⟧:", highlight=False)
    say(data.preview()[0], highlight=False, markup=False)


def starting_bar(console: Console) -> Callable[[int, int], None]:
    """A progress bar for the closed-form start; it stops by itself."""
    progress = Progress(*COLUMNS, console=console, disable=not interactive(), transient=True)
    task = progress.add_task("fitting the start")

    def advance(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=min(done, total), total=total)
        if done >= total:
            progress.stop()
            console.print(f"start: fitted in closed form on {done:,} positions", highlight=False)

    return advance


def conclude(cli: TrainCLI) -> None:
    """Say where everything is and what to do next."""
    heads = cli.folder / "heads"
    cli.console.print(
        f"heads: {heads}\nmetrics: {cli.trainer.loggers[0].log_dir}/metrics.csv\n"
        f'decode: mtp-decode generate --heads {heads} --prompt "Why is the sky blue?"\n'
        f"bench:  mtp-decode bench --heads {heads} --prompts configs/prompts/demo_heldout.jsonl --limit 8",
        highlight=False,
        soft_wrap=True,
    )


def regenerate_parser() -> ArgumentParser:
    """Options of `mtp-train regenerate`."""
    parser = ArgumentParser(
        prog="mtp-train regenerate",
        description="The base answers prompts: the data its heads should be trained on. Resumes where it stopped.",
        exit_on_error=False,
    )
    parser.add_argument("--base", type=str, default=BaseOptions.name, help="embedded name, folder, .gguf or Hub id")
    parser.add_argument("--revision", type=str | None, default=None, help="of a Hub id")
    parser.add_argument("--dtype", type=str, default=BaseOptions.dtype, help="auto, float32, bfloat16, float16")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:0, …")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that a Hub repository brings")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt, messages or turns")
    parser.add_argument("--out", type=Path, required=True, help="JSONL to append answers to")
    parser.add_argument("--limit", type=int | None, default=None, help="only the first so many prompts")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="per answer")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.7], help="one, or several used in turn; 0: greedy"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="prompts answered together")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    return parser


def run_regenerate(arguments: list[str]) -> None:
    """`mtp-train regenerate`."""
    options = regenerate_parser().parse_args(arguments)
    console = Console()
    from decode.prompts import read_prompts

    prompts = read_prompts(options.prompts, options.limit)
    base = load_base(
        BaseOptions(
            name=options.base,
            revision=options.revision,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        ),
        options.device,
        console,
    )
    with Progress(*COLUMNS, console=console, disable=not interactive()) as progress:
        task = progress.add_task("answers", total=len(prompts))
        report = regenerate(
            base,
            [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts],
            options.out,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            batch_size=options.batch_size,
            seed=options.seed,
            source=options.prompts.name,
            on_progress=lambda done, total, tokens: progress.update(task, completed=done, total=total),
        )
    rate = report.tokens / max(1e-9, report.seconds)
    skipped = "".join(f", {n} skipped: {why}" for why, n in report.skipped.items())
    console.print(
        f"{options.out}: {report.written} answers written, {report.found} already there{skipped}; "
        f"{report.tokens} tokens, {rate:.0f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
