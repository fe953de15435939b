"""A program of another environment that works for us: what it says is kept, and it is ended for certain.

Knows: processes, their group, and the last lines of a log. Refuses to know: what the program does.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtp.errors import UserError

_END_SECONDS, _LINES = 30, 12

Child = subprocess.Popen[bytes]


def start(
    command: Sequence[str],
    log: Path,
    *,
    piped: bool = False,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Child:
    """Run `command` in a process group of its own, which Ctrl-C does not reach: whoever starts it must `end` it.

    What it prints goes to `log`; with `piped`, its standard output is for us, and so is its input. UserError where it
    cannot be run.
    """
    pipe = subprocess.PIPE if piped else None
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                list(command),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or output,
                stderr=output,
                env=environment,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{command[0]} cannot be run ({error.strerror}); name a Python interpreter.") from None


def end(child: Child) -> None:
    """Politely, then by force: the process and all that it started."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_SECONDS)
    for stream in (child.stdin, child.stdout):
        with contextlib.suppress(OSError):
            if stream is not None:
                stream.close()


def last_words(log: Path) -> str:
    """The last lines of a log, where possible those that name an error."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(([line for line in lines if "Error" in line] or lines)[-_LINES:]) or "(nothing)"
