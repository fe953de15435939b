"""The command line's options, made from the one schema: every field of `Request` that a shell can spell.

Knows: how a field becomes an option, and options become a `Request`. Refuses to hold a default or a help text.
"""

from collections.abc import Collection
from dataclasses import Field, fields
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from decode.request import Request
from mtp.errors import UserError
from mtp.sampling import SamplingConfig

_AS_TEXT = {"bad_words_ids"}  # the shell gives --bad-words as text


def add_request_options(parser: ArgumentParser, without: Collection[str] = ()) -> None:
    """Add the options of a request to `parser`: all but those of the fields `without`."""
    hints, sampling = get_type_hints(Request), {item.name for item in fields(SamplingConfig)}
    groups = [parser.add_argument_group(title) for title in ("drafts, rules and ends", "sampling")]
    for item in fields(Request):
        if item.name not in _AS_TEXT and item.name not in without and not item.metadata.get("python_only"):
            _add(groups[item.name in sampling], item, hints[item.name])


def _add(parser: Any, item: "Field[Any]", hint: Any) -> None:
    name, text = item.name.replace("_", "-"), item.metadata["help"]
    shown = {"metavar": _metavar(hint)}
    if hint is bool and item.default:
        parser.add_argument(f"--no-{name}", action="store_true", help=f"do not {text}")
    elif hint is bool:
        parser.add_argument(f"--{name}", action="store_true", help=text)
    elif item.name == "logit_bias":
        shown = {"metavar": "ID=NUMBER"}
        parser.add_argument(f"--{name}", type=str, nargs="+", action="extend", default=[], help=text, **shown)
    elif hint in (tuple[str, ...], tuple[int, ...]):
        kind = str if hint == tuple[str, ...] else int
        parser.add_argument(f"--{name}", type=kind, nargs="+", action="extend", default=[], help=text, **shown)
    else:
        # A text is taken as it stands: as a text or nothing, it would be read as YAML, where "# a" is nothing.
        kind = str if hint == str | None else hint
        parser.add_argument(f"--{name}", type=kind, default=item.default, help=text, **shown)


def _metavar(hint: Any) -> str:
    """What stands for the value in the help."""
    kinds = set(get_args(hint)) or {hint}
    return "N" if int in kinds else "X" if float in kinds else "TEXT"


def read_request(options: Namespace, **changes: Any) -> Request:
    """The request that the options spell; what a command has no option for keeps its default."""
    values: dict[str, Any] = {}
    for item in fields(Request):
        if f"no_{item.name}" in options:
            values[item.name] = not options[f"no_{item.name}"]
        elif item.name in options:
            value = options[item.name]
            values[item.name] = tuple(value) if isinstance(value, list) else value
    if "logit_bias" in values:
        values["logit_bias"] = dict(_bias(text) for text in values["logit_bias"])
    return Request(**(values | changes))


def _bias(text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError:
        raise UserError(f"--logit-bias has {text!r}; use ID=NUMBER, as in 13=-2.5.") from None
