"""What the command lines of this package share: the look of a progress bar, and loading the base that options name.

Knows: the console. Refuses to know: what a command does with either.
"""

import os

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

from mtp.base import FrozenBase
from mtp.embedded import default_home
from train.options import BaseOptions


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
