"""Ctrl-C: what to tell whoever pressed it, and stopping between two steps instead of within one.

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


class Patience:
    """While it is held, the first Ctrl-C is remembered as `asked`; the second interrupts at once.

    Only the main thread can hold it; elsewhere Ctrl-C stays as it is.
    """

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.on_first, self.asked = on_first, False
        self._before: Any = None

    def hold(self) -> None:
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)

    def release(self) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.on_first()
