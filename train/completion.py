"""Shell completion of `mtp-train`: words for a line that is being typed, and the lines that hook it into a shell.

Knows: subcommands, keys and the shells' own hooks. Refuses to know: files; the shell completes those itself.
"""

from mtp.errors import UserError
from train.cli import COMMANDS

FLAGS = ("--config", "--ckpt_path", "--quiet", "--verbose", "--print_config", "--help", "--help-all")
_BASH = 'complete -o default -W "{words}" mtp-train'
HOOKS = {"bash": _BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}"}


def completion(shell: str) -> str:
    """Lines for the shell to evaluate."""
    if shell not in HOOKS:
        raise UserError(
            f'--completion is {shell!r}; allowed are {", ".join(HOOKS)}: eval "$(mtp-train --completion bash)".'
        )
    from train.schema import schema  # it brings all of Lightning along

    words = [*COMMANDS, *FLAGS, *(f"--{key}" for key in schema())]
    return HOOKS[shell].format(words=" ".join(words))
