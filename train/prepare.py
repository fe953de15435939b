"""What happens before the first training step: loading, telling, estimating, testing.

Knows: the order of these steps and what to say of each. Refuses to know: command lines, and how any step works.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from rich.console import Console
from rich.progress import Progress

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.memory import free_memory
from train.console import COLUMNS, load_base, load_share, warn
from train.cost import Devices, check_memory, estimate_memory, held_bytes, matrix_peak, product_dtype
from train.data import ChatDataModule
from train.feature_store import FeatureStore
from train.inspect import vocab_warning
from train.module import HeadsModule
from train.options import BaseOptions
from train.processes import Processes
from train.run import interactive
from train.self_test import run_self_tests
from train.sharded import ShardedStrategy


def prepare(
    processes: Processes, model: HeadsModule, data: ChatDataModule, folder: Path, home: Path, console: Console
) -> None:
    """Load base and data, build the heads, and show, estimate and test what will be trained. UserError where it cannot
    work. Of several processes the first tells and tests; tokens are made by one and read by the others."""
    trainer = processes.trainer
    base = base_for(processes, model.base_options, console)
    model.attach(base)
    data.set_tokenizer(base.tokenizer, vocab_size=base.vocab_size, context_length=base.context_length)
    if data.packing:
        base.require_packing()
    if data.streaming:
        check_streaming(trainer, model)
    set_up(data, console)
    model.build(data)
    model.on_start = starting_bar(console)
    introduce(model, data, folder, base, console)
    if processes.count > 1 and processes.rank == 0 and not data.streaming:
        idle = idle_warning(len(data.all_batches()), processes.count, data.batch_size)
        if idle:
            warn(console, idle)
    emulated = half_precision_warning(base, str(trainer.precision))
    if emulated:
        warn(console, emulated)
    model.memory_told = check_size(model, data, base, processes)
    if processes.rank == 0 or base.sharded:  # which is run by all or none
        test_itself(model, data, base, console)
    with trainer.precision_plugin.forward_context():  # as the steps will run
        if model.feature_options.keep:
            model.store = keep_features(model, data, base, home, console, processes)
        model.meter.peak = matrix_peak(base.device, product_dtype(base))
    processes.wait()  # training itself has less patience


def base_for(processes: Processes, options: BaseOptions, console: Console) -> FrozenBase:
    """The base on this process's device, or its share of one that is spread over all."""
    strategy = processes.trainer.strategy
    if isinstance(strategy, ShardedStrategy):
        return load_share(options, strategy.mesh, console, processes.wait)
    return load_base(options, str(strategy.root_device), console)


def check_streaming(trainer: lightning.Trainer, model: HeadsModule) -> None:
    """UserError for what needs to know all data."""
    if model.feature_options.keep:
        raise UserError(
            "model.features.keep is true and data.streaming too; what is read once is not worth keeping: set one of "
            "them to false."
        )
    if trainer.max_steps < 1:
        raise UserError("data.streaming is true, and such data have no end; set trainer.max_steps.")
    if isinstance(trainer.val_check_interval, float):
        told = f"trainer.val_check_interval is {trainer.val_check_interval}, a share of an epoch"
        raise UserError(f"{told}, which has no end with data.streaming; give a number of batches, such as 500.")


def test_itself(model: HeadsModule, data: ChatDataModule, base: FrozenBase, console: Console) -> None:
    """The self-tests on the first batches, and a line for each."""
    with bar(console) as progress:
        task = progress.add_task("self-tests", total=None)
        told = run_self_tests(
            base,
            model.trained,
            data.all_batches(),
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    for line in told:
        console.print(f"self-test: {line}", highlight=False, soft_wrap=True)


def bar(console: Console) -> Progress:
    """A progress bar, where people watch."""
    return Progress(*COLUMNS, console=console, disable=console.quiet or not interactive(), transient=True)


def set_up(data: ChatDataModule, console: Console) -> None:
    """Read and encode the records, with a bar."""
    with bar(console) as progress:
        task = progress.add_task("tokens", total=None)
        data.on_progress = lambda done, total: progress.update(task, completed=done, total=total)
        data.setup("fit")


def introduce(model: HeadsModule, data: ChatDataModule, folder: Path, base: FrozenBase, console: Console) -> None:
    """Say what will be trained on what, and show one example with its mask."""
    say, heads = console.print, model.trained
    count = sum(p.numel() for p in heads.parameters())
    say(
        f"run {folder}: {heads.config.kind} heads ({count / 1e6:.1f} M parameters) for {base.name} "
        f"({base.num_layers} layers, {base.dtype}, {base.device})",
        highlight=False,
        soft_wrap=True,
    )
    say(data.train_report.summary(), highlight=False, markup=False)
    if data.val_report is not None:
        say(f"validation: {data.val_report.summary()}", highlight=False, markup=False)
    warning = None
    if heads.draft_ids is not None:
        warning = vocab_warning(data.supervised_counts(base.vocab_size), heads.draft_ids)
    if warning:
        warn(console, f"warning: {warning}")
    say("first example, supervised tokens between ⟦ and ⟧:", highlight=False)
    say(data.preview()[0], highlight=False, markup=False)


def idle_warning(batches: int, processes: int, batch_size: int) -> str | None:
    """Of an epoch that has fewer batches than there are processes."""
    if batches >= processes:
        return None
    fewer = "use fewer (trainer.devices, trainer.num_nodes)"
    smaller = f", lower data.batch_size ({batch_size})" if batch_size > 1 else ""
    return (
        f"warning: an epoch has fewer batches ({batches}) than there are processes ({processes}): "
        f"{processes - batches} of them will have none and learn nothing; {fewer}{smaller}, or give more data."
    )


def half_precision_warning(base: FrozenBase, precision: str) -> str | None:
    """Of a CPU that has no instructions for it, as far as this torch tells what there is."""
    found: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    half = precision.startswith(("bf16", "16")) or base.dtype.itemsize < 4
    able = found.get("avx512_bf16") or found.get("amx_bf16") or found.get("architecture") != "x86_64"
    if base.device.type != "cpu" or not half or able:
        return None
    return (
        f"warning: trainer.precision is {precision} and the base in {str(base.dtype).removeprefix('torch.')}, but this "
        "CPU has no products in half precision: they are emulated, several times slower than trainer.precision 32-true."
    )


def check_size(model: HeadsModule, data: ChatDataModule, base: FrozenBase, processes: Processes) -> str:
    """The memory estimate for the longest batch that can come. UserError where it does not fit."""
    devices = Devices(processes.count, base.sharded)
    longest = min(data.max_length, max(map(len, data.train_examples)))
    length = data.max_length if data.packing else longest
    states = 2 if model.optimizer_options.kind == "adamw" else 1
    memory = estimate_memory(base, model.trained, length, model.loss_options.chunk, states, devices)
    free = free_memory(base.device)
    if free is not None:
        here = processes.trainer.num_devices if base.device.type == "cpu" else 1  # who share it
        free = free // here + held_bytes(base)
    told = check_memory(memory, data.batch_size, length, free)
    return told if processes.count == 1 else f"{told} on each of {processes.count} devices"


def keep_features(
    model: HeadsModule, data: ChatDataModule, base: FrozenBase, home: Path, console: Console, processes: Processes
) -> FeatureStore:
    """The store of the training examples, built as far as it is not there yet, by all processes together."""
    options = model.feature_options
    if base.sharded:
        raise UserError(
            "model.features.keep is true, and trainer.strategy fsdp spreads the base, which then runs on all devices "
            "or none; set it to false, or use ddp with a base that fits one device (model.base.quantise)."
        )
    if options.dir is None:
        options = replace(options, dir=str(home / "features"))
    store = FeatureStore(data.train_examples, base, model.trained.config.feature_layers, options)
    store.check_space()
    trainer = processes.trainer
    size, missing = store.size() / 1e9, len(store.missing())
    told = "all there" if not missing else f"{missing} files to write"
    console.print(f"features: {size:.2f} GB in {store.folder}, {told}", highlight=False, soft_wrap=True)
    with bar(console) as progress:
        task = progress.add_task("features", total=missing)
        tell = lambda done, total: progress.update(task, completed=done, total=total)  # noqa: E731
        store.build(processes.rank, processes.count, on_progress=tell)
        processes.wait()
        # Where nodes have disks of their own, this one now makes what others made for themselves.
        store.build(trainer.local_rank, trainer.num_devices, on_progress=tell)
        processes.wait()
    return store


def starting_bar(console: Console) -> Callable[[int, int], None]:
    """A progress bar for the closed-form start; it stops by itself."""
    progress = bar(console)
    task = progress.add_task("fitting the start")

    def advance(done: int, total: int) -> None:
        if not progress.live.is_started:
            progress.start()
        progress.update(task, completed=min(done, total), total=total)
        if done >= total:
            progress.stop()
            console.print(f"start: fitted in closed form on {done:,} positions", highlight=False)

    return advance
