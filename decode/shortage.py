"""What to say when memory runs out while a text is decoded.

Knows: what a token of text costs, and how many more would fit. Refuses to know: how to go on; what was decoded before
was handed out already.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.last_block import read_shape
from mtp.memory import free_memory, out_of_memory

_Item = TypeVar("_Item")


def place_bytes(base: FrozenBase) -> int:
    """Bytes of the keys and values of one token."""
    shape = read_shape(base)
    return 2 * base.num_layers * shape.num_key_value_heads * shape.head_dim * base.dtype.itemsize


def explained(items: Iterable[_Item], base: FrozenBase) -> Iterator[_Item]:
    """The items; where memory runs out in making one, UserError with the number of tokens that it has room for."""
    try:
        yield from items
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        each, free = place_bytes(base), free_memory(base.device)
        room = "" if free is None else f" and {free / 1e6:.0f} MB are free, room for some {free // each} of them"
        raise UserError(
            f"memory ran out on {base.device}: a token of text takes {each / 1e3:.0f} kB of keys and values{room}; "
            "lower --max-new-tokens, shorten the prompt, or load the base with --dtype bfloat16 or on another --device."
        ) from error
