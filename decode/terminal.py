"""What a command tells while it runs: lines on stderr, progress with rate and time left, and how it stops.

Knows: --quiet and --verbose, whether stderr is a terminal, and Ctrl-C. Refuses to know results, which are stdout's.
"""

import io
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
)
from rich.text import Text

from decode.report import Screen

_REFRESH = 4  # a second: whoever draws takes time from what may be measured
_BAR = 6  # columns, so that all of a line has room in 60


class Advance:
    """Call it after each unit; `note` is shown behind the bar from then on."""

    def __init__(self, bar: Progress, total: int, unit: str) -> None:
        self._bar = bar
        self._task = bar.add_task(unit, total=total, note="")

    def __call__(self, note: str = "", units: int = 1) -> None:
        self._bar.update(self._task, advance=units, note=note)


class _Rate(ProgressColumn):
    """Units per second or seconds of a unit, and the time left at this rate: means since the beginning, as units of
    minutes are too few for anything else."""

    def render(self, task: Task) -> Text:
        if not task.completed or not task.elapsed or task.total is None:
            return Text("")
        each = task.elapsed / task.completed
        rate = f"{1 / each:.1f}/s" if each < 1 else f"{each:.1f} s each"
        return Text(f"{rate}, {clock(each * (task.total - task.completed))} left")


def clock(seconds: float) -> str:
    """As in 1:05 or 2:00:09."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
        text = _wrapped(text)
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
        bar_column = BarColumn(_BAR if shutil.get_terminal_size().columns < 80 else 4 * _BAR)
        columns = (TextColumn("{task.description}"), bar_column, MofNCompleteColumn(), _Rate())
        with self._shown(*columns, TextColumn("{task.fields[note]}")) as bar:
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
            *columns, console=Screen(stderr=True), disable=hidden, transient=True, refresh_per_second=_REFRESH
        ) as bar:
            self._bar = bar
            try:
                yield bar
            finally:
                self._bar = None

    @contextmanager
    def stoppable(self, what: str) -> Iterator[Callable[[], bool]]:
        """Yields whether to stop: after a first Ctrl-C, which is told to wait for `what`. A second one interrupts.

        Only in the main thread, and not where signals are ignored; there the answer is always no.
        """
        asked: list[bool] = []

        def ask(signum: int, frame: FrameType | None) -> None:
            if asked:
                raise KeyboardInterrupt
            asked.append(True)
            self.say(f"stopping after {what}; Ctrl-C again leaves at once")

        before: Any = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
            yield lambda: False
            return
        signal.signal(signal.SIGINT, ask)
        try:
            yield lambda: bool(asked)
        finally:
            signal.signal(signal.SIGINT, before)


def _wrapped(text: str) -> str:
    """Between words, on a terminal; a path that has no room stays whole, so that it can be copied."""
    if not sys.stderr.isatty() or "\x1b" in text:
        return text
    columns = shutil.get_terminal_size().columns
    wrap = partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
    return "\n".join(line if len(line) <= columns else wrap(line) for line in text.split("\n"))


def exact_output() -> None:
    """From here on stdout shows what it cannot encode by its number, as a text is not ours to spell otherwise."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "spelt":
        sys.stdout.reconfigure(errors="backslashreplace")
