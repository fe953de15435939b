"""The commands of `mtp-decode`: what each is for, examples, and how its arguments are read.

Knows: names, help and which module has a command; loads only the one that is asked for. Refuses to know what an option
does.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter, Namespace

from mtp.errors import UserError
from mtp.suggest import did_you_mean, nearest

PROG = "mtp-decode"
EXIT_CODES = "exit codes: 0 done, 2 bad input, 130 interrupted"


@dataclass(frozen=True)
class Command:
    """A command: where it is, and its help."""

    module: str
    help: str
    """A few words, for the list of commands."""
    about: str
    examples: tuple[str, ...]
    """Arguments, as one would type them."""
    codes: str = EXIT_CODES
    add: str = "add_arguments"
    run: str = "run"


COMMANDS = {
    "generate": Command(
        "decode.generate_cli",
        "generate text",
        "Generate text on stdout; statistics go to stderr. With --output, a line of JSON per prompt goes to a file: "
        "the same command continues it.",
        (
            '--heads smollm2-135m --prompt "Why is the sky blue?"',
            '--heads H --prompt "Hi" --temperature 0.7 --seed 1 --json',
            "--heads H --prompts in.jsonl --output out.jsonl",
            '--base B --prompt "Hi" --lookup 5',
        ),
        "exit codes: 0 done, 1 some prompts of --output failed,\n  2 bad input, 130 interrupted",
    ),
    "chat": Command(
        "decode.chat_cli",
        "talk to the base",
        "Talk to the base, answer by answer. /help tells the commands; Ctrl-C stops an answer, Ctrl-D leaves.",
        ("--heads smollm2-135m", '--heads H --system "Be brief." --temperature 0.7'),
    ),
    "bench": Command(
        "decode.bench_cli",
        "compare speed",
        "Speed against decoding without heads.",
        (
            "--heads H --prompts in.jsonl --limit 6",
            "--heads H --prompts in.jsonl --draft-length auto",
            "--heads H --prompts in.jsonl --against plain --plot k.png",
        ),
    ),
    "check": Command(
        "decode.check_cli",
        "certify your own base and heads",
        "Is decoding with these heads lossless, here and now?",
        ("--heads H", "--heads H --samples 2000 --json"),
        "exit codes: 0 lossless, 1 a check failed,\n  2 bad input, 130 interrupted",
    ),
    "lab": Command(
        "decode.lab",
        "see what each acceptance rule does",
        "What each rule does to the base's law, and how much it keeps: on typed numbers, or on real heads.",
        (
            "--p 0.1,0.2,0.3,0.4 --q 0.4,0.3,0.2,0.1 --out lab.png",
            '--heads smollm2-135m --prompt "Why is the sky blue?"',
        ),
    ),
    "export": Command(
        "decode.export_cli",
        "write heads for vLLM, SGLang and others",
        "Write heads as vLLM, SGLang and others load them; what is written is read again and compared first.",
        ("--heads H --format eagle3 --output exports/eagle3",),
    ),
    "import": Command(
        "decode.export_cli",
        "read heads made for vLLM, SGLang and others",
        "Read heads that were made elsewhere; they are compared with what the other software computes first.",
        ("--input DIR --format eagle3 --base B --output runs/mine",),
        add="add_import_arguments",
        run="run_import",
    ),
    "completion": Command(
        "decode.completion",
        "completion for bash and zsh",
        "Print a script that lets the shell complete commands, options and their values.",
        ("> ~/.local/share/bash-completion/completions/mtp-decode",),
    ),
}

Run = Callable[[Namespace], int | None]


def overview() -> str:
    """What `mtp-decode --help` prints."""
    first = [f"  {PROG} {name} {COMMANDS[name].examples[0]}" for name in ("generate", "chat", "bench")]
    width = max(map(len, COMMANDS)) + 2
    listed = [f"  {name:{width}}{command.help}" for name, command in COMMANDS.items()]
    lines = ["Decode with heads, exactly as the base.", "", "examples:", *first, "", "commands:", *listed, ""]
    told = [f"{PROG} COMMAND --help tells more.", "exit codes: 0 done, 1 a check or prompt failed,"]
    return "\n".join([f"usage: {PROG} COMMAND [options]", "", *lines, *told, "  2 bad input, 130 interrupted", ""])


def parse(args: Sequence[str]) -> tuple[Run, Namespace]:
    """What runs the command, and its options. UserError for what there is not; SystemExit after --help."""
    if not args:
        raise UserError(f"the command is missing; use one of {', '.join(COMMANDS)}, or --help.")
    name = args[0]
    if name not in COMMANDS:
        raise UserError(f"the command is {name!r}; {did_you_mean(name, COMMANDS)}")
    parser = command_parser(name)
    try:
        options = parser.parse_args(list(args[1:]))
    except ArgumentError as error:
        raise UserError(_explained(str(error), name, flags(parser))) from None
    run: Run = getattr(import_module(COMMANDS[name].module), COMMANDS[name].run)
    return run, options


def command_parser(name: str) -> ArgumentParser:
    """The parser of one command."""
    command = COMMANDS[name]
    examples = [f"  {PROG} {name} {example}" for example in command.examples]
    parser = ArgumentParser(
        prog=f"{PROG} {name}",
        usage=f"{PROG} {name} [options]",
        description="\n".join(["examples:", *examples, "", command.about]),
        epilog=command.codes,
        formatter_class=Help,
        exit_on_error=False,
        allow_abbrev=False,
    )
    getattr(import_module(command.module), command.add)(parser)
    told = parser.add_argument_group("messages").add_argument
    told("--quiet", action="store_true", help="nothing on stderr but errors")
    told("--verbose", action="store_true", help="also what was loaded, and when")
    return parser


def flags(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser that its help shows, as they are typed, long ones only."""
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    return [flag for action in shown for flag in action.option_strings if flag.startswith("--")]


def _explained(message: str, name: str, known: Sequence[str]) -> str:
    """The parser's message, and for options that there are not what they may have been meant to be."""
    message = " ".join(message.split())
    if "nrecognized arguments" not in message:
        return f"{message[:1].upper()}{message[1:]}" if message.startswith("Parser key") else message
    unknown = [word.partition("=")[0] for word in re.findall(r"(?<!\S)--\S+", message)]
    near = {flag: nearest(flag, known) for flag in unknown}
    hints = [f"did you mean {meant}?" for meant in near.values() if meant is not None]
    listed = f"{PROG} {name} --help lists the options."
    return f"{message}; {' '.join(hints) or listed}"


class Help(DefaultHelpFormatter):
    """Keeps the lines of examples, and leaves out what a reader can do without: types, and defaults that are none."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = []
        for line in text.splitlines():
            lines += [line] if not line or line.startswith(" ") else [super()._fill_text(line, width, indent)]
        return "\n".join(lines)

    def _get_help_string(self, action: argparse.Action) -> str:
        without: Any = (None, False, argparse.SUPPRESS)
        default = action.default
        shown = not isinstance(default, list) and not any(default is nothing for nothing in without)
        return f"{action.help or ''} (default: {default})" if shown else action.help or ""
