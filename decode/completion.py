"""`mtp-decode completion`: a script that lets bash and zsh complete commands, options and some of their values.

Knows: the parsers and the shells' interfaces. The script is static: completing starts no Python. Refuses to know
options by name, except those whose values are a list of names.
"""

from collections.abc import Mapping, Sequence

from jsonargparse import ArgumentParser, Namespace

from decode.parser import COMMANDS, PROG, command_parser, flags

_SCRIPT = """# bash, and zsh behind bashcompinit; written by `{prog} completion`
if [ -n "$ZSH_VERSION" ]; then
  autoload -U +X bashcompinit && bashcompinit
fi
{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands} --help" -- "$word"))
    return
  fi
  case "$command $before" in
{values}
  esac
  if [ -n "$words" ]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    return
  fi
  case "$command" in
{options}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
  esac
}}
complete -o default -o bashdefault -F {function} {prog}
"""


def add_arguments(parser: ArgumentParser) -> None:
    """`completion` has no options."""


def run(options: Namespace) -> None:
    """`mtp-decode completion`."""
    known = {name: flags(command_parser(name)) for name in COMMANDS}
    print(script(PROG, known, _values()), end="")


def script(prog: str, known: Mapping[str, Sequence[str]], values: Mapping[str, Sequence[str]]) -> str:
    """For a program with commands and their options; `values` are those of an option, or of `command option`."""
    patterns = [f'    {_pattern(key)}) words="{" ".join(names)}" ;;' for key, names in values.items()]
    options = [f'    {name}) words="{" ".join(found)}" ;;' for name, found in known.items()]
    return _SCRIPT.format(
        prog=prog,
        function=f"_{prog.replace('-', '_')}",
        commands=" ".join(known),
        values="\n".join(patterns),
        options="\n".join(options),
    )


def _pattern(key: str) -> str:
    command, _, option = key.rpartition(" ")
    return f'"{command} {option}"' if command else f'*" {option}"'


def _values() -> dict[str, Sequence[str]]:
    """Names that options take; a folder or file is completed by the shell itself."""
    from decode.bench import RIVALS
    from decode.play import WHEN
    from mtp.embedded import EMBEDDED
    from mtp.formats.catalogue import FORMATS
    from mtp.formats.imports import IN_BASE, READERS
    from mtp.hub import shipped_heads
    from mtp.loading import DTYPES
    from mtp.verify import RULES

    return {
        "--base": sorted(EMBEDDED),
        "--heads": shipped_heads(),
        "export --format": list(FORMATS),
        "import --format": [*READERS, IN_BASE],
        "--verify": sorted(RULES),
        "--dtype": DTYPES,
        "--device": ("auto", "cpu", "cuda"),
        "--compile": ("auto", "on", "off"),
        "--colour": WHEN,
        "--against": RIVALS,
        "--draft-length": ("auto",),
        "--quantise": ("int8",),
    }
