"""The base as the engine sees it: a text that grows at its end, can be cut back, and has logits at its last places.

Knows: how to drive `FrozenBase` with its cache. Refuses to know about drafts, sampling and stopping. Tests put a table
in place of the base by implementing `Target`.

Shapes: B batch, T position, F features, V vocabulary.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decode.skinny import fast_products
from mtp.base import FrozenBase
from mtp.cache import BaseCache
from mtp.tree_mask import TreeMask

PREFILL_CHUNK = 512
"""Prompt positions per forward: bounds the memory of attention without costing speed."""


@dataclass
class TargetOutput:
    """What one forward over T tokens gives."""

    logits: Tensor
    """[B, n, V] float32 or better, of the last n positions that were asked for."""
    features: Tensor
    """[B, T, F] of all T positions."""


class Target(Protocol):
    """p, with a cache. All calls are for one batch that `start` begins."""

    @property
    def context_length(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def start(self, feature_layers: tuple[int, ...]) -> None:
        """Forget everything; features will be those of these hidden states."""

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        """Append tokens [B, T]; logits of the last `num_logits` of them."""

    def forward_tree(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> TargetOutput:
        """Append a tree: tokens [1, R] of which row r sees the cached ones and visible[r] [R, R], at depths[r] [R]
        places behind the first row. Logits of all. `keep` must follow before anything else is appended."""

    def rollback(self, length: int) -> None:
        """Drop everything after the first `length` tokens."""

    def keep(self, length: int, positions: Sequence[int]) -> None:
        """Keep the first `length` tokens and, behind them, those at `positions`, which rise."""


class BaseTarget:
    """`Target` over a frozen transformers model."""

    def __init__(self, base: FrozenBase) -> None:
        self.base = base
        self._cache: BaseCache | None = None
        self._feature_layers: tuple[int, ...] = ()

    @property
    def context_length(self) -> int:
        return self.base.context_length

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def device(self) -> torch.device:
        return self.base.device

    def start(self, feature_layers: tuple[int, ...]) -> None:
        self._cache = self.base.new_cache()
        self._feature_layers = feature_layers

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        assert self._cache is not None, "start() was not called"
        with self._products(tokens):
            outputs = [
                self.base.forward(chunk, cache=self._cache, feature_layers=self._feature_layers)
                for chunk in torch.split(tokens, PREFILL_CHUNK, dim=1)
            ]
            features = torch.cat([output.features for output in outputs], dim=1)
            hidden = outputs[-1].hidden
            assert num_logits <= hidden.shape[1], (num_logits, hidden.shape)
            return TargetOutput(self.base.logits(hidden[:, hidden.shape[1] - num_logits :]), features)

    def _products(self, tokens: Tensor) -> AbstractContextManager[object]:
        """How the model multiplies; where `FrozenBase.steps` takes its place, that has kernels of its own."""
        return nullcontext() if self.base.steps is not None else fast_products(tokens, self.base.kernels)

    def rollback(self, length: int) -> None:
        assert self._cache is not None, "start() was not called"
        self._cache.rollback(length)

    def hand_over(self) -> BaseCache:
        """The cache, of which nothing stays here."""
        cache, self._cache = self._cache, None
        assert cache is not None, "start() was not called"
        return cache

    def take_over(self, cache: BaseCache) -> None:
        """Go on with what `cache` holds, for the features that `start` asked for."""
        self._cache = cache

    def forward_tree(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> TargetOutput:
        assert self._cache is not None, "start() was not called"
        with self._products(tokens):
            output = self.base.forward(
                tokens, cache=self._cache, feature_layers=self._feature_layers, tree=TreeMask(visible, depths)
            )
            return TargetOutput(self.base.logits(output.hidden), output.features)

    def keep(self, length: int, positions: Sequence[int]) -> None:
        assert self._cache is not None, "start() was not called"
        self._cache.keep(length, positions)
