"""Types and values in words: what messages and help say of them.

Knows: type hints and YAML. Refuses to know: which keys there are.
"""

import dataclasses
import types
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def type_in_words(hint: Any) -> str:
    """What values a type allows, in words for people."""
    if hint in _WORDS:
        return _WORDS[hint]
    kind, arguments = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_in_words(one) for one in arguments))
    if kind is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if kind is tuple and ... not in arguments:
        return f"a list of {len(arguments)}: {', '.join(type_in_words(one) for one in arguments)}"
    if kind in (list, tuple):
        return f"a list, each {type_in_words(arguments[0])}"
    if kind is dict:
        return f"a mapping from {type_in_words(arguments[0])} to {type_in_words(arguments[1])}"
    if dataclasses.is_dataclass(hint):
        return f"a mapping with {', '.join(field.name for field in dataclasses.fields(hint))}"
    return f"a {getattr(hint, '__name__', str(hint))}"


def as_yaml(value: Any) -> str:
    """A default as it stands in YAML."""
    if value is ...:
        return "none, it must be given"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
