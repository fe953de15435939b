"""What the command lines of this package share: the look of a progress bar, and loading the base that options name.

Knows: the console. Refuses to know: what a command does with either.
"""

import os
import sys
from collections.abc import Callable

from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from torch.distributed.device_mesh import DeviceMesh

from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from mtp.quantise import check_quantise, quantise
from mtp.sharding import load_sharded
from train.options import BaseOptions


def warn(console: Console, text: str) -> None:
    """A line that --quiet does not silence: the first process tells it on stderr then."""
    if not console.quiet:
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    elif rank_zero_only.rank == 0:
        print(text, file=sys.stderr)


class RateColumn(ProgressColumn):
    """How many a second, or seconds for one."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.3g}/s" if speed >= 1 else f"{1 / speed:.3g} s each")


COLUMNS: tuple[ProgressColumn, ...] = (
    TextColumn("{task.description}"),
    BarColumn(bar_width=None),
    MofNCompleteColumn(),
    RateColumn(),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)


def load_share(options: BaseOptions, mesh: DeviceMesh, console: Console, wait: Callable[[], None]) -> FrozenBase:
    """This process's share of the base that the options name; `wait` returns when all processes are there."""
    if options.quantise is not None:
        raise UserError(
            f"model.base.quantise is {options.quantise}, and trainer.strategy fsdp spreads whole weights; use ddp, "
            "for which a rounded base may be small enough, or leave model.base.quantise out."
        )
    return load_sharded(
        options.name,
        mesh,
        revision=options.revision,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        home=default_home(os.environ),
        on_progress=lambda stage: console.print(stage, highlight=False),
        wait=wait,
    )


def load_base(options: BaseOptions, device: str, console: Console) -> FrozenBase:
    """The base that the options name, on `device`."""
    check_quantise(options.quantise, "model.base.quantise")
    base = FrozenBase.from_pretrained(
        options.name,
        revision=options.revision,
        dtype=options.dtype,
        device=device,
        trust_remote_code=options.trust_remote_code,
        home=default_home(os.environ),
        on_progress=lambda stage: console.print(stage, highlight=False),
    )
    if options.quantise is not None:
        quantise(base, options.quantise, "model.base.quantise")
    return base
