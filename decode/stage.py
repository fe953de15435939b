"""The key-value cache of several texts that go on by different numbers of tokens.

Knows: how every text keeps its keys and values from column 0 on, without holes, while all of them write their next
block at the same columns, the stage, which begins where the longest text ends. What is accepted moves from there to the
end of its own text, so a step copies a few columns, never the cache, and nothing has to be compacted. A mask over the
columns hides the gap between a text and the stage, and what pads its block. A text that is done gives its row to the
last one.
Refuses to know: models, tokens, what is accepted, and when a text is done.

Shapes: S slots, N rows in use, T columns, R columns of the stage. Keys and values are [S, heads, T, head size].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.texts_cache import TextsCache
from mtp.cache import BaseCache, RollbackLayer
from mtp.one_call import Past, Text

_FIRST_CAPACITY = 128  # columns


@dataclass
class _Stage:
    """Where the next block is written, and what the buffers of all layers are to hold."""

    slots: int
    capacity: int = 0
    rows: int = 0
    start: int = 0


class StageLayer(RollbackLayer):
    """Keys and values of one decoder layer for all texts; `stage` is shared by the layers of a cache."""

    def __init__(self, stage: _Stage) -> None:
        super().__init__()
        self._stage = stage

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write a block [N, heads, R, head size]; all columns up to its end [N, heads, T, head size]."""
        rows, start, end = self._stage.rows, self._stage.start, self._stage.start + key_states.shape[-2]
        for buffer, states in zip(self._ready(key_states, value_states), (key_states, value_states), strict=True):
            buffer[:rows, :, start:end] = states
        assert self._buffers is not None
        self.length = end
        self.keys, self.values = (buffer[:rows, :, :end] for buffer in self._buffers)
        return self.keys, self.values

    def _ready(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers of the stage's capacity. Zeros, since a masked column counts with weight 0, and 0 times a stray NaN
        is NaN."""
        slots, capacity = self._stage.slots, self._stage.capacity
        old = self._buffers
        if old is None or old[0].shape[2] < capacity:
            like = (keys, values) if old is None else old
            new_keys, new_values = (one.new_zeros(slots, one.shape[1], capacity, one.shape[3]) for one in like)
            for buffer, held in zip((new_keys, new_values), old or (), strict=False):
                buffer[:, :, : held.shape[2]] = held
            self._buffers = (new_keys, new_values)
            self.dtype, self.device, self.is_initialized = new_keys.dtype, new_keys.device, True
        assert self._buffers is not None
        return self._buffers

    def take(self, read: RollbackLayer, row: int, length: int) -> None:
        """The first `length` columns of a text that another cache holds become row `row`, and zeros behind them."""
        if read._buffers is None:  # nothing was read, or this layer reads the keys of another one
            for buffer in self._buffers or ():
                buffer[row].zero_()
            return
        for buffer, given in zip(self._ready(*read._buffers), read._buffers, strict=True):
            buffer[row, :, :length] = given[0, :, :length]
            buffer[row, :, length:].zero_()

    def move(self, places: Tensor) -> None:
        """places [3, n]: rows, columns, and the columns of the same rows that get what these hold."""
        rows, sources, targets = places
        for buffer in self._buffers or ():
            buffer[rows, :, targets] = buffer[rows, :, sources]  # copied before it is written, so these may overlap

    def move_row(self, source: int, target: int) -> None:
        for buffer in self._buffers or ():
            buffer[target] = buffer[source]


class StageCache(TextsCache):
    """Up to `slots` texts. `lengths` says how many tokens each row holds; `length`, how many columns come before the
    stage. `pattern` is an empty cache of the base; it tells which layers hold keys and values."""

    def __init__(self, pattern: BaseCache, slots: int) -> None:
        self._stage = _Stage(slots)
        super().__init__(pattern, lambda: StageLayer(self._stage))
        self._in_place = False

    def take(self, read: BaseCache) -> None:
        """Add the one text that `read` holds, behind the rows here."""
        assert len(self.lengths) < self._stage.slots
        self._make_room(read.length)
        for layer, given in zip(self.layers, read.layers, strict=True):
            layer.take(given, len(self.lengths), read.length)
        self._set_lengths([*self.lengths, read.length])

    def prepare(self, counts: Sequence[int], device: torch.device) -> Tensor:
        """Have room for a block of counts[i] tokens for row i, padded at the end to the widest. Returns the mask
        [N, T], long: what each row holds, and its tokens on the stage."""
        width = max(counts)
        self._make_room(self.length + width)
        held, new = torch.tensor([self.lengths, list(counts)], device=device)[:, :, None]
        columns = torch.arange(self.length + width, device=device)
        mask: Tensor = (columns < held) | ((columns >= self.length) & (columns < self.length + new))
        return mask.long()

    def past(self, counts: Sequence[int]) -> Past | None:
        """For kernels, which need no stage: room for counts[i] tokens behind the text of row i; `keep_first` must
        follow. None while nothing is held."""
        self._make_room(max(length + count for length, count in zip(self.lengths, counts, strict=True)))
        held = [layer._buffers for layer in self.layers if layer._buffers is not None]
        if len(held) < len(self.layers):
            return None
        buffers = [layer._ready(*those) for layer, those in zip(self.layers, held, strict=True)]
        _, heads, capacity, size = buffers[0][0].shape
        places = enumerate(zip(counts, self.lengths, strict=True))
        texts = [Text(count, length, row * heads * capacity * size) for row, (count, length) in places]
        self._in_place = True
        return Past(buffers, (capacity * size, size), texts)

    def advance(self, count: int) -> None:
        """The block is there; `keep_first` says what of it stays."""
        self.length += count

    def keep_first(self, counts: Sequence[int]) -> None:
        """Row i keeps the first counts[i] tokens of its block."""
        start = self._stage.start
        moves = [
            (row, start + place, length + place)
            for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True))
            for place in range(count if length < start and not self._in_place else 0)
        ]
        self._in_place = False
        if moves:
            places: Tensor | None = None
            for layer in self.layers:
                if layer._buffers is not None:
                    places = torch.tensor(moves, device=layer.device).T if places is None else places
                    layer.move(places)
        self._set_lengths([length + count for length, count in zip(self.lengths, counts, strict=True)])

    def give(self, row: int, empty: BaseCache) -> BaseCache:
        """The text of a row, copied into an empty cache of the base."""
        length = self.lengths[row]
        for layer, other in zip(self.layers, empty.layers, strict=True):
            if layer._buffers is not None:
                keys, values = (buffer[row : row + 1, :, :length] for buffer in layer._buffers)
                other.update(keys, values)
        empty.advance(length)
        return empty

    def _make_room(self, columns: int) -> None:
        if columns > self._stage.capacity:
            self._stage.capacity = max(_FIRST_CAPACITY, 1 << (columns - 1).bit_length())

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths, self.length = lengths, max(lengths, default=0)
        self._stage.rows, self._stage.start = len(lengths), self.length
        for layer in self.layers:
            layer.length = self.length
