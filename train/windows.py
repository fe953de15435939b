"""Cutting a sequence that is too long so that no supervised token is lost.

Knows: where the windows of a sequence lie. Refuses to know: what the tokens are.
"""

from torch import Tensor

CONTEXT = 4  # a window that begins inside a sequence starts max_length / 4 before its first target, unsupervised there

Window = tuple[
    int, int, int
]  # start, first target, end: tokens start…end-1, of which those from the first target count


def windows(supervised: Tensor, max_length: int) -> list[Window]:
    """Windows of at most `max_length` tokens over supervised [S]; each supervised token counts in exactly one of them.

    The first begins at the beginning if it reaches a supervised token from there; otherwise the left of a long prompt
    goes. Stretches with nothing supervised get no window. The last one reaches back as far as it may, since it is free.
    """
    size = len(supervised)
    if size <= max_length:
        return [(0, 0, size)] if bool(supervised.any()) else []
    context = max(1, max_length // CONTEXT)
    found: list[Window] = []
    done = 0
    while bool(supervised[done:].any()):
        first = done + int(supervised[done:].nonzero()[0])
        start = 0 if not found and first < max_length else min(first - context, size - max_length)
        end = start + max_length
        found.append((start, first, end))
        done = end
    return found
