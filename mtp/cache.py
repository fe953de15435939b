"""The base's key-value cache with exact rollback.

Knows: how to hold keys and values of every position in buffers that grow by doubling, so that a step writes only its
own rows and a rollback only moves a length. Sliding-window layers keep all positions as well: the mask does the
sliding, and a rollback across the window's edge stays exact.

Refuses to know: models, tokens, masks. States that cannot be rolled back (linear attention, Mamba, indexed attention)
are refused by name in `new_cache`.

Shapes: B batch, T position. Keys and values are [B, heads, T, head size].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from mtp.errors import UserError

_FIRST_CAPACITY = 128  # positions
Buffers = tuple[Tensor, Tensor]
"""Of one layer: keys and values [B, heads, capacity, head size]."""


class RollbackLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one decoder layer; `length` positions of the buffers count.

    `keys` and `values` are what the latest `update` returned, for attention to read at once: a later call may overwrite
    it. Calls must not record gradients.
    """

    is_sliding = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.length = 0
        self._buffers: Buffers | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        start, end = self.length, self.length + key_states.shape[-2]
        keys, values = self._room(end, key_states, value_states)
        keys[:, :, start:end] = key_states
        values[:, :, start:end] = value_states
        self.length = end
        self.keys, self.values = keys[:, :, :end], values[:, :, :end]
        return self.keys, self.values

    def extend(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both buffers [B, heads, capacity, head size], in which `count` places more count as held: the caller writes
        them. like [B, heads, any, head size]: what the first buffers are to be like."""
        buffers = self._room(self.length + count, like, like)
        self.length += count
        return buffers

    def _room(self, end: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Buffers with place for `end` positions, holding the first `length` ones."""
        if self._buffers is not None and self._buffers[0].shape[-2] >= end:
            return self._buffers
        capacity = max(_FIRST_CAPACITY, 1 << (end - 1).bit_length())
        keys, values = (s.new_empty(*s.shape[:2], capacity, s.shape[-1]) for s in (key_states, value_states))
        if self._buffers is not None:
            keys[:, :, : self.length] = self._buffers[0][:, :, : self.length]
            values[:, :, : self.length] = self._buffers[1][:, :, : self.length]
        self._buffers = (keys, values)
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        return self._buffers

    def relocate(self, to: Buffers) -> None:
        """Hold the same positions in other buffers, which have room for them."""
        for before, after in zip(self._buffers or (), to, strict=False):
            after[:, :, : self.length] = before[:, :, : self.length]
        self._buffers = to
        self.dtype, self.device, self.is_initialized = to[0].dtype, to[0].device, True

    def rollback(self, length: int) -> None:
        """Keep the first `length` positions. Layers that share another layer's keys stay empty, hence the minimum."""
        self.length = min(length, self.length)

    def keep(self, length: int, positions: Tensor) -> None:
        """Keep the first `length` positions and, behind them, those at `positions` [n], which rise."""
        if self._buffers is None:
            return
        for buffer in self._buffers:  # indexing copies before it writes, so the ranges may overlap
            buffer[:, :, length : length + len(positions)] = buffer[:, :, positions]
        self.length = length + len(positions)

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def reset(self) -> None:
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        # Only FrozenBase uses these layers, and it rolls back by length: the meaning of this argument changed between
        # releases of transformers.
        raise NotImplementedError("use BaseCache.rollback")


class BaseCache:
    """Keys and values of the base for the first `length` positions."""

    def __init__(self, layers: list[Any], slides: bool = False) -> None:
        self.slides = slides
        """Whether a layer of the base sees a sliding window only."""
        self.layers = [layer for layer in layers if isinstance(layer, RollbackLayer)]
        self.length = 0
        self.native = Cache(layers=layers)

    def advance(self, count: int) -> None:
        """Note that the base has run over `count` more positions; called by FrozenBase only."""
        self.length += count

    def rollback(self, length: int) -> None:
        """Forget everything after the first `length` positions, exactly and without copying.

        Raises UserError when `length` is not between 0 and the current length.
        """
        if not 0 <= length <= self.length:
            raise UserError(f"rollback length {length} is outside 0…{self.length}, the positions the cache holds.")
        for layer in self.layers:
            layer.rollback(length)
        self.length = length

    def keep(self, length: int, positions: Sequence[int]) -> None:
        """Keep the first `length` positions and, moved up behind them, those at `positions`, which rise.

        For the accepted path of a tree: its rows were computed for the places they move to.
        """
        assert all(length <= place < self.length for place in positions), (length, positions, self.length)
        for layer in self.layers:
            if layer._buffers is not None:
                layer.keep(length, torch.tensor(list(positions), dtype=torch.long, device=layer._buffers[0].device))
        self.length = length + len(positions)

    def holds(self, buffers: Sequence[Buffers]) -> bool:
        """Whether the layers keep their positions in these."""
        pairs = zip(self.layers, buffers, strict=True)
        return all(layer._buffers is not None and layer._buffers[0] is keys for layer, (keys, _) in pairs)

    def relocate(self, buffers: Sequence[Buffers]) -> None:
        """Hold the same positions in other buffers, a pair for each layer."""
        for layer, to in zip(self.layers, buffers, strict=True):
            layer.relocate(to)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows `rows` [B'] (long), in that order; this copies the cache once."""
        for layer in self.layers:
            if layer._buffers is not None:
                keys, values = layer._buffers
                layer._buffers = (keys.index_select(0, rows), values.index_select(0, rows))


def new_cache(config: Any, base_name: str) -> BaseCache:
    """Empty cache for a base with this config, or UserError when one of its layers keeps another kind of state."""
    layers: list[Any] = []
    natives = DynamicCache(config=config).layers
    for native in natives:
        if type(native) in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append(RollbackLayer())
        elif (
            type(native).__name__ == "DummyLayer"
        ):  # holds nothing: an MLP layer, or one that reads another layer's keys
            layers.append(native)
        else:
            raise UserError(refusal(base_name, type(native).__name__))
    if not layers:  # the config does not tell its layers apart, so all are plain attention
        layers = [RollbackLayer() for _ in range(int(config.get_text_config(decoder=True).num_hidden_layers))]
    return BaseCache(layers, slides=any(type(native) is DynamicSlidingWindowLayer for native in natives))


def refusal(base_name: str, cache_type: str) -> str:
    """Message for a base whose state cannot be rolled back."""
    return (
        f"base {base_name!r} keeps its past in {cache_type}, which cannot be rolled back after a rejected draft token; "
        "use a base whose layers are all attention with a key-value cache."
    )
