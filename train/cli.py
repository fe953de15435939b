"""`mtp-train`: train heads from one YAML file, look at its data, or let the base write them.

Knows: the subcommands, and exit codes: 0 done, 2 bad input, 130 interrupted.
Refuses to know: what a command does. Each is imported when it is asked for, so that help comes at once.
"""

import os
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import decode.cli
from mtp.errors import UserError
from mtp.suggest import did_you_mean
from train.interrupt import Interrupted, command_line

BAD_INPUT, INTERRUPTED = 2, 130


class Command(NamedTuple):
    """Where a subcommand's function is, which takes its arguments and may return an exit code; and what it does."""

    module: str
    function: str
    about: str
    resumes: bool = False
    """Whether the same command goes on where it was interrupted."""


COMMANDS = {
    "inspect": Command("train.inspect_cli", "run_inspect", "look at a config's data without training"),
    "regenerate": Command("train.regenerate_cli", "run_regenerate", "the base answers prompts: training data", True),
    "compare": Command("train.compare_cli", "run_compare", "train several configs and compare them", True),
    "report": Command("train.report_cli", "run_report", "write the page of a run anew, from its folder"),
    "dashboard": Command("train.dashboard_cli", "run_dashboard", "save the acceptance-length dashboard in W&B"),
    "completion": Command("train.help", "run_completion", "completion for bash and zsh"),
}
FIT = Command("train.fit", "fit", "train")


def entry() -> None:
    """The console script."""
    decode.cli.entry(main)


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        return run(arguments)
    except (UserError, ArgumentError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader has seen enough, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        remedy = "make room there, or name a folder that can be written; a run goes on from its last checkpoint"
        print(f"error: {where}{error.strerror or error}; {remedy}.", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as stop:
        print(f"\n{farewell(stop, arguments)}", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as stop:  # --help
        return int(stop.code or 0)


def run(arguments: list[str]) -> int:
    """Run the command that the first argument names, or train; returns the exit code."""
    if not arguments:
        raise UserError("--config is missing; name a YAML file such as configs/demo.yaml, or see mtp-train --help.")
    first, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(first)
    if command is None:
        if not first.startswith("-") and not first.endswith((".yaml", ".yml")):
            raise UserError(f"the command is {first!r}; {did_you_mean(first, COMMANDS)}")
        if {"-h", "--help", "--help-all"} & set(arguments):
            show_help("--help-all" in arguments)
            return 0
        command, rest = FIT, arguments
    function: Any = getattr(import_module(command.module), command.function)
    decode.cli.answer_interrupts()
    code = function(rest)
    return code if isinstance(code, int) else 0


def show_help(every_key: bool) -> None:
    """`mtp-train --help`, or `--help-all`."""
    from train.help import full_help, short_help

    print(full_help() if every_key else short_help(), end="")


def farewell(stop: KeyboardInterrupt, arguments: Sequence[str]) -> str:
    """What to say after Ctrl-C: how to go on."""
    command = COMMANDS.get(arguments[0]) if arguments else None
    if command is not None and command.resumes:  # also if a training that it began knows how to go on by itself
        return f"interrupted; what is done is kept. Go on with\n{command_line(arguments)}"
    if isinstance(stop, Interrupted):
        return f"interrupted; {stop}"
    return f"interrupted; nothing was trained. Start again with\n{command_line(arguments)}"
