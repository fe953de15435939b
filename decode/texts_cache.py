"""What the key-value caches of several texts at once have in common: texts leave, and are never cut back.

Knows: that the last row takes the place of one that leaves. Refuses to know: where the columns of a text lie.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from mtp.cache import BaseCache, RollbackLayer


class TextsCache(BaseCache):
    """`lengths` says how many tokens each row holds. Its layers have `move_row(source, target)`."""

    def __init__(self, pattern: BaseCache, make_layer: Callable[[], RollbackLayer]) -> None:
        """`pattern` is an empty cache of the base; it tells which layers hold keys and values."""
        native: list[Any] = pattern.native.layers
        layers = [make_layer() if isinstance(layer, RollbackLayer) else layer for layer in native]
        super().__init__(layers, slides=pattern.slides)
        self.lengths: list[int] = []

    def drop(self, row: int) -> None:
        """Forget a text; the last row takes its place."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self.layers:
                layer.move_row(last, row)
            self.lengths[row] = self.lengths[last]
        self._set_lengths(self.lengths[:last])

    @abstractmethod
    def _set_lengths(self, lengths: list[int]) -> None:
        """Rows are as many, and hold so many tokens."""

    def rollback(self, length: int) -> None:
        raise NotImplementedError("the texts of a batch are dropped, not cut back")

    def keep(self, length: int, positions: Sequence[int]) -> None:
        raise NotImplementedError("the texts of a batch are dropped, not cut back")

    def select(self, rows: Tensor) -> None:
        raise NotImplementedError("the texts of a batch are dropped and taken in")
