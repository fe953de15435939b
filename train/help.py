"""`mtp-train --help`: examples first, then what there is; every key with `--help-all`.

Knows: the words. Refuses to know: what keys mean, beyond what their classes say of themselves.
"""

import shutil
import textwrap

from train.cli import COMMANDS

WIDEST = 100
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
  --config FILE       YAML; repeat it to lay one file over another
  --KEY VALUE         changes any key of it, such as --model.heads.draft_length 4
  --ckpt_path FILE    goes on from a checkpoint: runs/NAME/checkpoints/last.ckpt
  --quiet, --verbose  fewer words; or what Lightning says, too (run.verbosity)
  --print_config      prints every key as it would be used, and ends
  --help-all          explains every key
  --completion bash   prints completion for bash, or zsh: eval "$(mtp-train --completion bash)"

exit codes: 0 done, 2 bad input, 130 interrupted (Ctrl-C; the way to go on is printed)
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


def short_help() -> str:
    """What most people want to know."""
    commands = "".join(f"  mtp-train {name:<12}{command.about}\n" for name, command in COMMANDS.items())
    return f"{EXAMPLES}\ncommands (each has --help)\n{commands}\nkeys most often set\n{_names()}{OPTIONS}"


def _names() -> str:
    return textwrap.fill(", ".join(USUAL), 76, initial_indent="  ", subsequent_indent="  ") + "\n"


def full_help() -> str:
    """Every key with its type, default and help."""
    from train.schema import as_yaml, in_words, schema  # they bring all of Lightning along

    width, lines, group = min(WIDEST, shutil.get_terminal_size().columns), [], ""
    for name, key in schema().items():
        if name.rpartition(".")[0] != group:
            group = name.rpartition(".")[0]
            lines += ["", group]
        indent = {"initial_indent": "      ", "subsequent_indent": "      "}
        told = f"  {name} = {as_yaml(key.default)}   ({in_words(key.hint)})"
        lines.append(textwrap.fill(told, width, subsequent_indent="      "))
        if key.help:
            lines.append(textwrap.fill(key.help, width, **indent))
    return short_help() + "\n".join(lines)
