"""Ctrl-C and SIGTERM: what to tell whoever sent it, and stopping between two steps instead of within one.

Knows: signals, and command lines as text. Refuses to know: what was being done.
"""

import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in a command that can say how to go on."""


class ToldToEnd(BaseException):
    """SIGTERM. No `except Exception` on its way out, of which libraries have many, keeps it."""


def command_line(arguments: Sequence[str]) -> str:
    """The `mtp-train` command of these arguments, on one line that can be copied."""
    return shlex.join(["mtp-train", *arguments])


def resuming(arguments: Sequence[str], checkpoint: object) -> str:
    """The command that goes on from `checkpoint`, whichever one the arguments named."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--ckpt_path="):
            skip = False
        elif argument == "--ckpt_path":
            skip = True
        else:
            kept.append(argument)
    return command_line([*kept, "--ckpt_path", str(checkpoint)])


@contextmanager
def told(advice: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C in here carries `advice()`, unless it already carries some."""
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt:
        raise Interrupted(advice()) from None


@contextmanager
def handler_kept() -> Iterator[None]:
    """Lightning ignores Ctrl-C for good once it has seen one; afterwards it is answered as before."""
    before: Any = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


ENDINGS: dict[int, tuple[str, type[BaseException]]] = {
    signal.SIGINT: ("Ctrl-C", KeyboardInterrupt),
    signal.SIGTERM: ("SIGTERM", ToldToEnd),
}


class Patience:
    """While it is held, the first Ctrl-C or SIGTERM is remembered as `asked`, and `on_first` gets its name; the second
    ends at once.

    Only the main thread can hold it; elsewhere signals stay as they are.
    """

    def __init__(self, on_first: Callable[[str], None]) -> None:
        self.on_first = on_first
        self.asked: int | None = None
        self._before: dict[int, Any] = {}

    def hold(self) -> None:
        if not self._before and threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in ENDINGS}

    def release(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def end(self) -> None:
        """What the signal that was remembered asked for. Raises KeyboardInterrupt or ToldToEnd."""
        assert self.asked is not None
        raise ENDINGS[self.asked][1]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise ENDINGS[number][1]
        self.asked = number
        self.on_first(ENDINGS[number][0])
