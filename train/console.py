"""What the command lines of this package share: the look of a progress bar, and loading the base that options name.

Knows: the console. Refuses to know: what a command does with either.
"""

import os

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mtp.base import FrozenBase
from mtp.embedded import default_home
from train.options import BaseOptions

COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
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
