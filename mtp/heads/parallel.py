"""`parallel`: K transformer blocks side by side on one hidden state, under one norm.

Head k = 1…K at anchor t: logits = U norm(Block_k(h)_t), predicting token t+k+1; its attention sees anchors <= t. No
head reads a token. Source: Gloeckle et al. 2024, arXiv 2404.19737: the heads' trunk is the base without its last layer.

Shapes: B batch, T position, M anchors, K draft position, D hidden.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mtp.config import HeadsConfig
from mtp.heads.blocks import Block, KeyValues, make_norm
from mtp.heads.interface import Heads, Layout, State
from mtp.targets import take_anchors


@dataclass
class ParallelState(State):
    """Keys and values of the `length` verified anchors per head, and the features [B,1,D] of the last one."""

    caches: list[KeyValues]
    length: int = 0
    features: Tensor | None = None

    def select(self, rows: Tensor) -> "ParallelState":
        caches = [cache.select(rows) for cache in self.caches]
        return ParallelState(len(rows), caches, self.length, None if self.features is None else self.features[rows])


class ParallelHeads(Heads):
    """See the module. Reads one feature layer. Trainable parameters: K `block_parameters` + 1 norm, which is
    K (D (H + 2J) E + H E D + 3 D I + 2 D) + D for blocks of Llama's type."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.block is not None, "parallel heads need the shape of their block"
        size, shape = config.hidden_size, config.block
        self.blocks = nn.ModuleList(Block(size, shape) for _ in range(config.draft_length))
        self.norm = make_norm(size, shape)

    def block(self, k: int) -> Block:
        """The block of head k = 1…K."""
        return cast(Block, self.blocks[k - 1])

    def _unroll(self, features: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        picked, places, visible = take_anchors(features, layout.anchors), layout.places(), layout.visible()
        blocks = [self.block(k) for k in range(1, self.config.draft_length + 1)]
        states = [block(picked, places, block.keys_values(features, layout.positions), visible) for block in blocks]
        normalised: Tensor = self.norm(torch.stack(states, dim=2))
        return normalised

    def new_state(self, batch_size: int) -> ParallelState:
        return ParallelState(batch_size, [KeyValues() for _ in self.blocks])

    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        assert isinstance(state, ParallelState)
        if not features.shape[1]:
            return
        features = features.to(self.precision)
        batch, count = features.shape[:2]
        positions = torch.arange(state.length, state.length + count, device=features.device).expand(batch, count)
        for k, cache in enumerate(state.caches, start=1):
            keys, values = self.block(k).keys_values(features, positions)
            cache.write(keys, values, state.length)
        state.length += count
        state.features = features[:, -1:]

    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        assert isinstance(state, ParallelState)
        assert state.features is not None, "ingest() at least one anchor before drafting"
        position = torch.full((state.batch_size, 1), state.length - 1, device=state.features.device)
        hidden = self.block(k)(state.features, position, state.caches[k - 1].first(state.length))
        return self.project(self.norm(hidden[:, 0]))
