"""The key-value cache of many texts at once, each of its own length, whose places are given to other texts.

Knows: how to keep the texts of a batch aligned at their ends, so that every one writes the same column, a mask over
the columns is that of a left-padded batch (which every family of transformers understands, sliding windows included),
and a step copies nothing. A text that is done gives its row to the last one; a new one comes in with the keys and
values that it was read with. Columns are moved to the front once in many steps.
Refuses to know: models, tokens, and when a text is done.

Shapes: S slots, R rows in use, T columns. Keys and values are [S, heads, T, head size].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from decode.texts_cache import TextsCache
from mtp.cache import BaseCache, RollbackLayer
from mtp.one_call import Past, Text

SLACK = 128  # columns to grow into before all are moved: the copy is then below one per cent of the steps between


@dataclass
class _Window:
    """What attention sees of the buffers: `rows` rows, and the columns from `first` up to `end`."""

    rows: int = 0
    first: int = 0
    end: int = 0


class SlotLayer(RollbackLayer):
    """Keys and values of one decoder layer for all texts; `window` is shared by the layers of a cache."""

    def __init__(self, window: _Window) -> None:
        super().__init__()
        self._window = window

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the next column; keys and values [R, heads, T, head size] of all that the texts hold."""
        assert self._buffers is not None
        rows, first, end = self._window.rows, self._window.first, self._window.end
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:rows, :, end : end + 1] = states
        self.length = end + 1 - first
        self.keys, self.values = (buffer[:rows, :, first : end + 1] for buffer in self._buffers)
        return self.keys, self.values

    def move_columns(self, end: int, capacity: int) -> None:
        """New buffers with `capacity` columns, where what the window shows ends at `end`."""
        if self._buffers is not None:
            window = self._window
            self._buffers = (
                _moved(self._buffers[0], window, end, capacity),
                _moved(self._buffers[1], window, end, capacity),
            )

    def move_row(self, source: int, target: int) -> None:
        for buffer in self._buffers or ():
            shown = slice(self._window.first, self._window.end)
            buffer[target, :, shown] = buffer[source, :, shown]

    def rotate(self, cycle: Sequence[int]) -> None:
        """Each row of the cycle gets what the next one holds, and the last what the first held."""
        shown = slice(self._window.first, self._window.end)
        for buffer in self._buffers or ():
            kept = buffer[cycle[0], :, shown].clone()
            for target, source in pairwise(cycle):
                buffer[target, :, shown] = buffer[source, :, shown]
            buffer[cycle[-1], :, shown] = kept

    def take(self, read: RollbackLayer, lengths: Sequence[int], slots: int, capacity: int) -> None:
        """Texts that another cache holds from column 0 on, one a row, go behind the rows in use."""
        if read._buffers is None:  # a layer that reads the keys of another one
            return
        if self._buffers is None:
            # Zeros, since a masked column still counts with weight 0, and 0 times a stray NaN is NaN.
            keys, values = (b.new_zeros(slots, b.shape[1], capacity, b.shape[3]) for b in read._buffers)
            self._buffers = (keys, values)
            self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        rows, end = self._window.rows, self._window.end
        for buffer, given in zip(self._buffers, read._buffers, strict=True):
            for row, length in enumerate(lengths):
                buffer[rows + row, :, end - length : end] = given[row, :, :length]


def _moved(buffer: Tensor, window: _Window, end: int, capacity: int) -> Tensor:
    moved = buffer.new_zeros(*buffer.shape[:2], capacity, buffer.shape[3])
    width = window.end - window.first
    moved[: window.rows, :, end - width : end] = buffer[: window.rows, :, window.first : window.end]
    return moved


def _cycles(order: Sequence[int]) -> list[list[int]]:
    """The permutation as cycles of two rows or more; each row gets what the next of its cycle holds."""
    seen, cycles = set[int](), []
    for start in range(len(order)):
        cycle, row = [], start
        while row not in seen:
            seen.add(row)
            cycle.append(row)
            row = order[row]
        if len(cycle) > 1:
            cycles.append(cycle)
    return cycles


class SlotCache(TextsCache):
    """Up to `slots` texts. `lengths` says how many tokens each row holds; `length`, how many columns all of them span.

    `pattern` is an empty cache of the base; it tells which layers hold keys and values.
    """

    def __init__(self, pattern: BaseCache, slots: int) -> None:
        self._window = _Window()
        super().__init__(pattern, lambda: SlotLayer(self._window))
        self.slots = slots
        self._capacity = 0

    def mask(self, device: torch.device) -> Tensor:
        """Which columns each text holds [R, T + 1], long; the last is the one that comes next, real for all."""
        columns = torch.arange(self.length + 1, device=device)
        return (columns >= self.length - torch.tensor(self.lengths, device=device)[:, None]).long()

    def past(self) -> Past:
        """What all texts hold, each to be lengthened by the column that comes next; `advance` must follow."""
        buffers = [layer._buffers for layer in self.layers if layer._buffers is not None]
        _, heads, capacity, size = buffers[0][0].shape
        row, end = heads * capacity * size, self._window.end
        texts = [Text(1, length, n * row + (end - length) * size) for n, length in enumerate(self.lengths)]
        return Past(buffers, (capacity * size, size), texts)

    def advance(self, count: int) -> None:
        self._window.end += count
        self._set_lengths([length + count for length in self.lengths])
        self._make_room(0)

    def take(self, read: BaseCache, lengths: Sequence[int]) -> None:
        """Add the texts that `read` holds, one a row from column 0 on, `lengths` tokens each, behind the rows here."""
        assert len(self.lengths) + len(lengths) <= self.slots
        self._make_room(max(lengths))
        for layer, given in zip(self.layers, read.layers, strict=True):
            layer.take(given, lengths, self.slots, self._capacity)
        self._set_lengths([*self.lengths, *lengths])

    def reorder(self, order: Sequence[int]) -> None:
        """Row i becomes what row `order[i]` was, by moving only the rows that change place."""
        for cycle in _cycles(order):
            for layer in self.layers:
                layer.rotate(cycle)
        self._set_lengths([self.lengths[row] for row in order])

    def _make_room(self, before: int) -> None:
        """Have a free column behind the window, and `before` columns in front of its end."""
        if self._window.end < self._capacity and self._window.end >= before:
            return
        end = max(self.length, before)
        for layer in self.layers:
            layer.move_columns(end, end + SLACK)
        self._capacity = end + SLACK
        self._window.end = end
        self._set_lengths(self.lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths, self.length = lengths, max(lengths, default=0)
        self._window.rows, self._window.first = len(lengths), self._window.end - self.length
        for layer in self.layers:
            layer.length = self.length
