"""`mtp-decode`: from arguments to a command, and from what becomes of it to an exit code.

Knows: which errors are the user's, and how a program ends. Refuses to know options (`decode.parser`), and to import
anything that takes time before Ctrl-C is answered.
"""

import codecs
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
_SPELT = {
    "×": "x", "…": "...", "–": "-", "—": "-", "·": "*", "“": '"', "”": '"', "’": "'", "→": "->", "±": "+-", "∞": "inf",
    "Σ": "sum", "α": "alpha", "τ": "tau", "≤": "<=", "≥": ">=", "−": "-", "‘": "'", "½": "1/2", "␣": "_", "□": "?",
    "⟦": "[[", "⟧": "]]",
}  # fmt: skip


def entry(run: Callable[[], int] | None = None) -> None:
    """The console script: of this program, or of one with another `run`."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is for a job in the background of a script
        signal.signal(signal.SIGINT, _leave)  # while modules are loaded there is nothing to keep, and much to break
    codecs.register_error("spelt", _spelt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a character shows what is like it
            stream.reconfigure(errors="spelt")
    code = (run or main)()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interpreter's own end is no place for a traceback
    sys.exit(code)


def _leave(signum: int, frame: object) -> None:
    """Ends the program at once: an exception could be caught by whatever is being imported."""
    os.write(2, b"\ninterrupted; nothing was begun.\n")
    os._exit(INTERRUPTED)


def _spelt(error: UnicodeError) -> tuple[str | bytes, int]:
    """An error handler of codecs: our own signs by what is like them, all else by its number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    part = error.object[error.start : error.end]
    return "".join(_SPELT.get(c, c.encode("ascii", "backslashreplace").decode()) for c in part), error.end


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        return _run(sys.argv[1:] if args is None else list(args))
    except KeyboardInterrupt:  # of commands that have nothing to keep
        print("\ninterrupted; the same command starts again.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a name that is too long, a disk that is full
        place = error.filename or "output"
        print(f"error: {error.strerror or error} ({place}); choose another place.", file=sys.stderr)
        return BAD_INPUT
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def _run(args: list[str]) -> int:
    from decode.parser import overview, parse
    from mtp.errors import UserError

    if args and args[0] in ("-h", "--help", "help"):
        print(overview(), end="")
        return 0
    try:
        run, options = parse(args)
        options.typed = list(args)  # a page says how it was made
        answer_interrupts()
        return run(options) or 0
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT


def answer_interrupts() -> None:
    """From here on Ctrl-C is an exception, which commands keep their results from."""
    current: Any = signal.getsignal(signal.SIGINT)
    if current is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
