"""`sequential`: K modules in a chain, each with its own projection, transformer block and norms.

Depth k = 1…K at anchor s reads token x_{s+k} and the state of the depth below; h^0 is the base's state:

    h^k_s = Block_k( M_k [norm_e(e(x_{s+k})) ; norm_h(h^{k-1}_s)] )_{anchors <= s};   logits = U norm_k(h^k_s)

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. Families differ in which half of M_k's input comes first
(`concat_order`).

Decoding: with t the last verified anchor, token t+1 is known, so depth k is final for anchors s <= t+1-k. Behind them
stand at most k-1 anchors whose token is a draft; each draft computes those anew.

Shapes: B batch, T position, K draft position, D hidden, N anchors that are computed.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from mtp.config import HeadsConfig
from mtp.heads.blocks import Block, KeyValues, make_norm
from mtp.heads.interface import Heads, Layout, State
from mtp.layers import Linear
from mtp.targets import draft_inputs, take_anchors


class Depth(nn.Module):
    """One module of the chain. Parameters: 2 D^2 + one block + three norms."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        assert config.block is not None, "sequential heads need the shape of their block"
        size, shape = config.hidden_size, config.block
        self.embed_first = config.concat_order == "embed_hidden"
        self.embed_norm = make_norm(size, shape)
        self.hidden_norm = make_norm(size, shape)
        self.projection = Linear(2 * size, size, bias=False)
        self.block = Block(size, shape)
        self.norm = make_norm(size, shape)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the block reads [...,D]: e(x) [...,D] and the state below [...,D]."""
        halves = [self.embed_norm(embedded), self.hidden_norm(hidden)]
        joined: Tensor = self.projection(torch.cat(halves if self.embed_first else halves[::-1], dim=-1))
        return joined


@dataclass
class SequentialState(State):
    """What each depth knows for good, and the latest draft.

    After `length` verified anchors depth k is final for the first `final(k)` of them: `caches[k-1]` holds their keys
    and values, and `tails[k-1]` [B,0 or 1,D] those of its states that depth k+1 cannot have used yet. `drafted` [B,k-1]
    are the tokens of this draft and `fresh` [B,N,D] the states of the depth asked last behind its final ones.
    """

    caches: list[KeyValues]
    tails: list[Tensor] = field(default_factory=list)
    length: int = 0
    drafted: Tensor | None = None
    fresh: Tensor | None = None

    def final(self, k: int) -> int:
        return max(0, self.length + 1 - k)

    def select(self, rows: Tensor) -> "SequentialState":
        return SequentialState(
            len(rows),
            [cache.select(rows) for cache in self.caches],
            [tail[rows] for tail in self.tails],
            self.length,
            None if self.drafted is None else self.drafted[rows],
            None if self.fresh is None else self.fresh[rows],
        )


class SequentialHeads(Heads):
    """See the module. Reads one feature layer. Trainable parameters: K (2 D^2 + `block_parameters` + 3 norms), which is
    K (2 D^2 + D (H + 2J) E + H E D + 3 D I + 5 D) for blocks of Llama's type."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.depths = nn.ModuleList(Depth(config) for _ in range(config.draft_length))

    def depth(self, k: int) -> Depth:
        """The module of depth k = 1…K."""
        return cast(Depth, self.depths[k - 1])

    def _unroll(self, features: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        inputs, visible = draft_inputs(tokens, self.config.draft_length), layout.visible_everywhere()
        hidden, states = features, []
        for k in range(1, self.config.draft_length + 1):
            depth = self.depth(k)
            joined = depth.join(self.embed(inputs[:, :, k - 1]), hidden)
            shared = depth.block.keys_values(joined, layout.positions)
            hidden = depth.block(joined, layout.positions, shared, visible)
            states.append(depth.norm(take_anchors(hidden, layout.anchors)))
        return torch.stack(states, dim=2)

    def new_state(self, batch_size: int) -> SequentialState:
        return SequentialState(batch_size, [KeyValues() for _ in self.depths])

    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        assert isinstance(state, SequentialState)
        state.drafted = state.fresh = None
        if not features.shape[1]:
            return
        below = features.to(self.precision)  # states of the depth below at the anchors that this depth has not used
        before = [state.final(k) for k in range(1, len(self.depths) + 1)]
        old = state.tails or [below[:, :0]] * len(self.depths)
        state.length, state.tails = state.length + features.shape[1], []
        for k, start in enumerate(before, start=1):
            # Depth k becomes final at as many anchors as it now has tokens for: all of the new ones, once under way.
            count = state.final(k) - start
            states = below[:, :0]
            if count:
                states = self._advance(state, k, below[:, :count], next_tokens[:, -count:], start)
            below = torch.cat([old[k - 1], states], dim=1)
            state.tails.append(below[:, below.shape[1] - (state.final(k) - state.final(k + 1)) :])

    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        assert isinstance(state, SequentialState)
        assert state.tails, "ingest() at least one anchor before drafting"
        if k == 1:
            state.fresh, state.drafted = state.tails[0][:, :0], previous.unsqueeze(1)[:, :0]
            return self._logits(k, state.tails[0])
        assert state.fresh is not None, "draft positions are asked in order, from 1"
        assert state.drafted is not None
        state.drafted = torch.cat([state.drafted[:, : k - 2], previous.unsqueeze(1)], dim=1)
        below = torch.cat([state.tails[k - 2], state.fresh], dim=1)
        count = below.shape[1]
        state.fresh = self._advance(state, k, below, state.drafted[:, -count:], state.length - count)
        return self._logits(k, state.fresh)

    def _advance(self, state: SequentialState, k: int, below: Tensor, tokens: Tensor, start: int) -> Tensor:
        """h^k [B,N,D] at the anchors from `start` on, of the states below [B,N,D] and their tokens [B,N]."""
        depth = self.depth(k)
        joined = depth.join(self.embed(tokens), below)
        positions = torch.arange(start, start + joined.shape[1], device=joined.device).expand(joined.shape[:2])
        keys, values = depth.block.keys_values(joined, positions)
        states: Tensor = depth.block(joined, positions, state.caches[k - 1].write(keys, values, start))
        return states

    def _logits(self, k: int, states: Tensor) -> Tensor:
        """Logits [B,Vd] of the last of the states [B,N,D]."""
        return self.project(self.depth(k).norm(states[:, -1]))
