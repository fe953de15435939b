"""Did you mean …: the nearest of the names that there are.

Knows: spelling. Refuses to know what the names stand for, and which of them may be used together.
"""

from collections.abc import Iterable
from difflib import get_close_matches

_FEW = 10  # names that a message has room for
_CLOSE = 0.6  # of difflib's ratio: one wrong letter in four, or two exchanged ones, are still close


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that `given` was most likely meant to be; None if none is close.

    Case and the choice between - and _ count for nothing. What only one name begins with stands for it.
    """
    names = {_bare(name): name for name in known}
    bare = _bare(given)
    if not bare:
        return None
    close = get_close_matches(bare, names, 1, _CLOSE)
    begun = [name for name in names if name.startswith(bare)]
    if bare not in names and len(begun) == 1:
        return names[begun[0]]
    return names[close[0]] if close else None


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The last part of a message about an unknown name: "use one of block, token; did you mean 'block'?". Of many names
    only the near one is told, and without a near one all."""
    names = list(known)
    near, all_of_them = nearest(given, names), f"use one of {', '.join(names)}"
    if near is None:
        return f"{all_of_them}."
    return f"did you mean {near!r}?" if len(names) > _FEW else f"{all_of_them}; did you mean {near!r}?"


def _bare(name: str) -> str:
    return name.strip().casefold().replace("-", "_").lstrip("_")
