"""The one exception that users are meant to read.

Knows: the type, and whose an exception is. Applications print its message in one line and exit with code 2; every other
exception is a fault of the software and keeps its traceback. A function that the user wrote is input, too.
"""

from collections.abc import Callable
from typing import TypeVar

_Answer = TypeVar("_Answer")


class UserError(ValueError):
    """Bad input. The message names the option, the value, what is allowed and the remedy."""


def ask_user(what: str, function: Callable[..., _Answer], *args: object) -> _Answer:
    """What a function of the user's returns. An exception of it is a UserError that names it, whose cause it is; so it
    ends the text that asked, and no other one of a batch."""
    try:
        return function(*args)
    except UserError:
        raise
    except Exception as error:
        name = getattr(function, "__name__", type(function).__name__)  # a class's own name tells nothing of a function
        raise UserError(f"the {what} {name} raised {type(error).__name__}: {error}; correct it.") from error
