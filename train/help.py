"""`mtp-train --help`: examples first, then what there is; every key with `--help-all`.

Knows: the words. Refuses to know: what keys mean, beyond what their classes say of themselves.
"""

import re
import shutil
import textwrap
from collections.abc import Sequence

from jsonargparse import ArgumentError, ArgumentParser, Namespace

from decode.completion import script
from decode.parser import Help, flags
from mtp.errors import UserError
from mtp.suggest import nearest
from train.cli import COMMANDS
from train.words import as_yaml, type_in_words

WIDEST = 100
FLAGS = ("--config", "--ckpt_path", "--quiet", "--verbose", "--print_config", "--help", "--help-all")
WHERE = "> ~/.local/share/bash-completion/completions/mtp-train"
COMPLETION = "Print a script that lets the shell complete commands, options and keys."
EXAMPLES = """\
Train heads on a frozen base from one YAML file.

  mtp-train --config configs/demo.yaml
  mtp-train --config configs/demo.yaml --run.name short --trainer.max_steps 4
  mtp-train --config runs/demo/config.yaml --ckpt_path runs/demo/checkpoints/last.ckpt
  mtp-train inspect --config configs/demo.yaml
  mtp-train regenerate --prompts configs/prompts/demo_train.jsonl --out runs/answers.jsonl
"""
OPTIONS = """
options
  --config FILE       YAML; repeat it: one file over another
  --KEY VALUE         any key: --model.heads.kind medusa
  --ckpt_path FILE    from runs/X/checkpoints/last.ckpt on
  --quiet, --verbose  fewer words or more (run.verbosity)
  --print_config      print every key as it would be used
  --help-all          explain every key

exit codes: 0 done, 2 bad input, 130 interrupted
"""
USUAL = (
    "model.base.name",
    "model.heads.kind",
    "model.heads.draft_length",
    "model.heads.draft_vocab_size",
    "data.train",
    "data.max_length",
    "data.batch_size",
    "trainer.max_steps",
    "trainer.max_epochs",
    "trainer.precision",
    "trainer.devices",
    "run.name",
)


def command_parser(name: str, about: str, examples: Sequence[str]) -> ArgumentParser:
    """The parser of a subcommand, whose help has examples first."""
    told = ["examples:", *(f"  mtp-train {name} {example}" for example in examples), "", about]
    return ArgumentParser(
        prog=f"mtp-train {name}",
        usage=f"mtp-train {name} [options]",
        description="\n".join(told),
        epilog="exit codes: 0 done, 2 bad input, 130 interrupted",
        formatter_class=Help,
        exit_on_error=False,
        allow_abbrev=False,
    )


def read_options(parser: ArgumentParser, arguments: Sequence[str]) -> Namespace:
    """The options of a subcommand. UserError names what is wrong and what was meant."""
    try:
        return parser.parse_args(list(arguments))
    except ArgumentError as error:
        raise UserError(_explained(" ".join(str(error).split()), parser)) from None


def _explained(message: str, parser: ArgumentParser) -> str:
    listed = f"see {parser.prog} --help."
    wrong = re.match(r'Parser key "([\w.]+)"', message)
    if wrong:
        value = re.search(r"(?:Got value|Given value): (.*)$", message)
        hint = next((getattr(one, "_typehint", None) for one in parser._actions if one.dest == wrong[1]), None)
        allowed = f"allowed is {type_in_words(hint)}; " if hint is not None else ""
        return f"--{wrong[1].replace('_', '-')} is {value[1] if value else 'of another type'!s}; {allowed}{listed}"
    if "nrecognized arguments" in message:
        word = next((word for word in message.split() if word.startswith("--")), message.split()[-1])
        flag = word.partition("=")[0]
        meant = nearest(flag, flags(parser))
        return f"{flag} is no option of {parser.prog}; " + (f"did you mean {meant}?" if meant else listed)
    return f"{message}; {listed}"


def run_completion(arguments: Sequence[str]) -> None:
    """`mtp-train completion`: a script for the shell. Options of training complete without a command, too."""
    read_options(command_parser("completion", COMPLETION, (WHERE,)), arguments)
    from train.compare_cli import compare_parser
    from train.regenerate_cli import regenerate_parser
    from train.schema import schema

    keys = [*FLAGS, *(f"--{key}" for key in schema())]
    known = {name: [*keys, "--count", "--json"] if name == "inspect" else ["--help"] for name in COMMANDS}
    known |= {"regenerate": flags(regenerate_parser()), "compare": flags(compare_parser()), "--config": keys}
    print(script("mtp-train", known, {}), end="")


def short_help() -> str:
    """What most people want to know."""
    commands = "".join(f"  {name:<12}{command.about}\n" for name, command in COMMANDS.items())
    return f"{EXAMPLES}\ncommands: mtp-train COMMAND --help\n{commands}\nkeys most often set\n{_names()}{OPTIONS}"


def _names() -> str:
    return textwrap.fill(", ".join(USUAL), 60, initial_indent="  ", subsequent_indent="  ") + "\n"


def full_help() -> str:
    """Every key with its type, default and help."""
    from train.schema import schema  # they bring all of Lightning along

    width, lines, group = min(WIDEST, shutil.get_terminal_size().columns), [], ""
    for name, key in schema().items():
        if name.rpartition(".")[0] != group:
            group = name.rpartition(".")[0]
            lines += ["", group]
        indent = {"initial_indent": "      ", "subsequent_indent": "      "}
        told = f"  {name} = {as_yaml(key.default)}   ({type_in_words(key.hint)})"
        lines.append(textwrap.fill(told, width, subsequent_indent="      "))
        if key.help:
            lines.append(textwrap.fill(key.help, width, **indent))
    return short_help() + "\n".join(lines)
