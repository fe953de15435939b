"""What a command tells while it runs: lines on stderr, progress with rate and time left, and how it stops.

Knows: --quiet and --verbose, whether stderr is a terminal, and Ctrl-C. Refuses to know results, which are stdout's.
"""

import io
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jsonargparse import Namespace
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from decode.report import Screen

_BAR = 16  # columns, so that all of a line has room in 60
_PERIOD = 3600.0  # seconds whose units tell the rate; rich's own 30 would forget one that takes longer


class Advance:
    """Call it after each unit; `note` is shown behind the bar from then on."""

    def __init__(self, bar: Progress, total: int, unit: str) -> None:
        self._bar = bar
        self._task = bar.add_task(unit, total=total, note="")

    def __call__(self, note: str = "", units: int = 1) -> None:
        self._bar.update(self._task, advance=units, note=note)


class _Rate(ProgressColumn):
    """Units per second, or seconds of a unit."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("")
        return Text(f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each")


class Terminal:
    """stderr, as --quiet and --verbose want it."""

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet, self.verbose = quiet, verbose
        self._bar: Progress | None = None
        self._started = time.perf_counter()

    @classmethod
    def of(cls, options: Namespace) -> "Terminal":
        """As the options say; a command without them is neither quiet nor verbose."""
        return cls(bool(options.get("quiet")), bool(options.get("verbose")))

    def say(self, text: str) -> None:
        """A line, unless --quiet."""
        if self.quiet:
            return
        if self._bar is not None and not self._bar.disable:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr)

    def detail(self, text: str) -> None:
        """A line with the seconds since the command began, if --verbose."""
        if self.verbose and not self.quiet:
            self.say(f"[{time.perf_counter() - self._started:.1f} s] {text}")

    @contextmanager
    def tracked(self, total: int, unit: str) -> Iterator[Advance]:
        """A progress bar with rate and time left while stderr is a terminal; yields what to call after each unit."""
        columns = (
            TextColumn("{task.description}"), BarColumn(_BAR), MofNCompleteColumn(), _Rate(),
            TimeRemainingColumn(compact=True), TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        with self._shown(*columns) as bar:
            yield Advance(bar, total, unit)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """The same while something without parts goes on: what, and for how long."""
        with self._shown(SpinnerColumn("line"), TextColumn("{task.description}"), TimeElapsedColumn()) as bar:
            bar.add_task(text, total=None)
            yield

    @contextmanager
    def _shown(self, *columns: ProgressColumn) -> Iterator[Progress]:
        hidden = self.quiet or not sys.stderr.isatty()
        with Progress(
            *columns, console=Screen(stderr=True), disable=hidden, transient=True, speed_estimate_period=_PERIOD
        ) as bar:
            self._bar = bar
            try:
                yield bar
            finally:
                self._bar = None

    @contextmanager
    def stoppable(self, what: str) -> Iterator[Callable[[], bool]]:
        """Yields whether to stop: after a first Ctrl-C, which is told to wait for `what`. A second one interrupts.

        Only where the main thread asks; elsewhere nothing is changed, and the answer is always no.
        """
        asked: list[bool] = []

        def ask(signum: int, frame: FrameType | None) -> None:
            if asked:
                raise KeyboardInterrupt
            asked.append(True)
            self.say(f"stopping after {what}; Ctrl-C again leaves at once")

        try:
            before: Any = signal.signal(signal.SIGINT, ask)
        except ValueError:  # not the main thread
            yield lambda: False
            return
        try:
            yield lambda: bool(asked)
        finally:
            signal.signal(signal.SIGINT, before)


def exact_output() -> None:
    """From here on stdout shows what it cannot encode by its number, as a text is not ours to spell otherwise."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "spelt":
        sys.stdout.reconfigure(errors="backslashreplace")
