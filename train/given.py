"""What a command line and its YAML files say, key by key with its place, checked before anything is made of it.

Knows: YAML, flags, and how to name what is wrong in one line. Refuses to know: which keys there are, beyond the list it
is given, and what values mean.
"""

import re
from argparse import ArgumentError
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import yaml

from mtp.errors import UserError
from mtp.suggest import nearest
from train.schema import Key, groups
from train.words import as_yaml, type_in_words


class Given(NamedTuple):
    """One key as somebody wrote it, and where: `file.yaml:12`, or `--key`."""

    key: str
    value: Any
    where: str


def check_given(arguments: Sequence[str], keys: Mapping[str, Key], options: Collection[str]) -> list[Given]:
    """Everything that is said. UserError for keys that do not exist and nulls where none may be.

    options: flags besides the keys; those in it that take no value end with `!`.
    """
    given = list(read_arguments(arguments, keys, options))
    for one in given:
        key = keys.get(one.key)
        if key is None:
            if one.key not in options and not _inside(one.key, keys):
                raise UserError(unknown(one, keys, options))
        elif one.value is None and not key.nullable:
            remedy = "give a value" if key.default is ... else f"remove it for the default, {as_yaml(key.default)}"
            raise UserError(f"{one.key} is null ({one.where}); allowed is {type_in_words(key.hint)}: {remedy}.")
    return given


def read_arguments(arguments: Sequence[str], keys: Mapping[str, Key], options: Collection[str]) -> Iterator[Given]:
    """What flags say, and the files that they name."""
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word in ("-", "--"):
            raise UserError(_stray(word))
        name, equals, value = word.lstrip("-").partition("=")
        name = {"c": "config"}.get(name, name.removesuffix("+"))
        if f"{name}!" in options:
            continue
        if not equals:
            if not rest or (rest[0].startswith("--") and not rest[0].startswith("---")):
                _require_known(name, keys, options)
                raise UserError(f"--{name} has no value; write one behind it: --{name} VALUE.")
            value = rest.pop(0)
        if name == "config":
            yield from read_file(Path(value), keys)
        elif name in groups(keys):
            yield from _group(name, value, keys)
        else:
            yield Given(name, _plain(value), f"--{name}")


def read_file(path: Path, keys: Mapping[str, Key], prefix: str = "") -> Iterator[Given]:
    """The keys of a YAML file. UserError where it is none, or holds a key twice."""
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or "is no text in UTF-8"
        near = sorted(str(found) for found in path.parent.glob("*.y*ml"))
        hint = nearest(str(path), near)
        remedy = f"did you mean {hint}?" if hint else "name a YAML file such as configs/demo.yaml."
        raise UserError(f"--config {path}: {told}; {remedy}") from None
    yield from _document(text, str(path), keys, prefix)


def _document(text: str, name: str, keys: Mapping[str, Key], prefix: str) -> Iterator[Given]:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        told = getattr(error, "problem", None) or "cannot be read"
        raise UserError(f"{where} is not YAML ({told}); correct that line, or the one before it.") from None
    if node is not None and not isinstance(node, yaml.MappingNode):
        raise UserError(f"{name} holds no keys; write lines such as `run: {{name: demo}}`.")
    if node is not None:
        yield from _mapping(node, name, keys, prefix)


def _mapping(node: yaml.MappingNode, name: str, keys: Mapping[str, Key], prefix: str) -> Iterator[Given]:
    seen: set[str] = set()
    for left, right in node.value:
        key, where = f"{prefix}{left.value}", f"{name}:{left.start_mark.line + 1}"
        if key in seen:
            raise UserError(f"{key} is given a second time ({where}); keep one of the two.")
        seen.add(key)
        if key in groups(keys) and isinstance(right, yaml.MappingNode):
            yield from _mapping(right, name, keys, f"{key}.")
        elif key in groups(keys):
            inside = [one.rpartition(".")[2] for one in keys if one.rpartition(".")[0] == key][:4]
            raise UserError(f"{key} is {right.value or 'empty'} ({where}); it holds keys such as {', '.join(inside)}.")
        else:
            yield Given(key, yaml.safe_load(yaml.serialize(right)), where)


def _group(name: str, value: str, keys: Mapping[str, Key]) -> Iterator[Given]:
    """A group given as one flag: a mapping in YAML or JSON, or a file with one."""
    if value.endswith((".yaml", ".yml", ".json")):
        return read_file(Path(value), keys, f"{name}.")
    return _document(value, f"--{name}", keys, f"{name}.")


def _plain(value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _inside(name: str, keys: Collection[str]) -> bool:
    """Whether it belongs to a value that is a class of its own, such as `trainer.callbacks.patience`."""
    parts = name.split(".")
    return any(".".join(parts[:n]) in keys for n in range(1, len(parts)))


def _require_known(name: str, keys: Mapping[str, Key], options: Collection[str]) -> None:
    if name not in keys and name not in options and name not in groups(keys) and not _inside(name, keys):
        raise UserError(unknown(Given(name, None, f"--{name}"), keys, options))


def _stray(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"{word} stands alone; write --config {word}."
    return f"{word!r} belongs to no option; options begin with two dashes, see mtp-train --help."


def unknown(one: Given, keys: Collection[str], options: Collection[str] = ()) -> str:
    """A key that does not exist, and the one that is probably meant."""
    meant = meant_by(one.key, [*keys, *groups(keys), *(option.removesuffix("!") for option in options)])
    flag = one.where.startswith("--")
    said = one.where if flag and one.where == f"--{one.key}" else f"{one.key} ({one.where})"
    if meant is not None:
        return f"{said} does not exist; did you mean {'--' * flag}{meant}?"
    group = one.key.rpartition(".")[0]
    siblings = [key for key in keys if group and key.rpartition(".")[0] == group]
    remedy = f"allowed are {', '.join(siblings)}." if siblings else "mtp-train --help-all lists every key."
    return f"{said} does not exist; {remedy}"


def meant_by(key: str, names: Sequence[str]) -> str | None:
    """The name that is meant by one that does not exist: of the same group, at another place, or just alike."""
    group, _, leaf = key.rpartition(".")
    beside = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == group}
    found = nearest(leaf, list(beside))
    if found is not None:
        return beside[found]
    moved = [name for name in names if name.endswith(f".{key}")] or [n for n in names if n.rpartition(".")[2] == leaf]
    return moved[0] if moved else nearest(key, list(names))


def explain(error: ArgumentError, given: Sequence[Given], keys: Mapping[str, Key]) -> str:
    """What jsonargparse refused, in one line: option, value, place, what is allowed, remedy."""
    text = str(error)
    found = re.search(r'Parser key "([\w.]+)"', text)
    said = [one for one in given if found and one.key == found[1]]
    if said and said[-1].key in keys:
        one = said[-1]
        key = keys[one.key]
        choices = [
            str(c) for hint in (key.hint, *get_args(key.hint)) if get_origin(hint) is Literal for c in get_args(hint)
        ]
        meant = nearest(str(one.value), choices)
        remedy = f"did you mean {meant}?" if meant else f"the default is {as_yaml(key.default)}."
        return f"{one.key} is {one.value!r} ({one.where}); allowed is {type_in_words(key.hint)}: {remedy}"
    missing = re.search(r"required: ([\w., ]+)", text)
    if missing:
        return f"{missing[1]} is missing; give it in the file, or as --{missing[1].split(',')[0]} VALUE."
    return text
