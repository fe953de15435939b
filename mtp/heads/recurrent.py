"""`recurrent`: one transformer block applied K times, unrolled on its own hidden state.

At anchor t, draft position k reads token x_{t+k} and the state g^{k-1}; g^0 = fc(h_t) fuses the feature layers:

    a   = [norm_e(e(x_{t+k})) ; norm_h(g^{k-1})]                        (2D wide)
    z   = g^{k-1} + attention(a);   g^k = z + mlp(norm_m(z));   logits = U norm(g^k)

Attention at draft position k sees the first-position keys of anchors <= t and the anchor's own keys of positions 2…k,
in training as in decoding. Sources: EAGLE-3, arXiv 2503.01840 (block, feature fusion, training-time test) and FastMTP,
arXiv 2509.18362 (one block shared by all positions).

Shapes: B batch, T position, M anchors, K draft position, D hidden, H query heads, J key-value heads, G = H / J, E head
size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp.config import BlockShape, HeadsConfig
from mtp.heads.interface import Heads, State
from mtp.targets import take_anchors


class FusedAttention(nn.Module):
    """Grouped-query attention over inputs of width 2D with rotary positions; keys are never repeated."""

    def __init__(self, size: int, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * size, width, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, size, bias=False)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """[B,M,2D] at positions [B,M] to [B,M,J,G,E]."""
        heads = self.q_proj(inputs).unflatten(-1, (self.shape.num_attention_heads, self.shape.head_dim))
        rotated = rotate(heads, positions, self.shape.rope_theta)
        batch, length = inputs.shape[:2]
        return rotated.view(batch, length, self.shape.num_key_value_heads, -1, self.shape.head_dim)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[B,T,2D] at positions [B,T] to keys and values, each [B,T,J,E]."""
        split = (self.shape.num_key_value_heads, self.shape.head_dim)
        keys = rotate(self.k_proj(inputs).unflatten(-1, split), positions, self.shape.rope_theta)
        return keys, self.v_proj(inputs).unflatten(-1, split)

    def output(self, mixed: Tensor) -> Tensor:
        """[B,M,J,G,E] to [B,M,D]."""
        projected: Tensor = self.o_proj(mixed.flatten(2))
        return projected


def rotate(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of heads [B,T,H,E] at positions [B,T], pairs (i, i + E/2). Su et al., arXiv 2104.09864."""
    half = heads.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=heads.device, dtype=torch.float32) / half)
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(2)
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Softmax attention over shared keys and over the anchor's own earlier draft positions.

    queries [B,M,J,G,E]; keys, values [B,T,J,E]; visible [B,M,T]; own: (key, value) pairs, each [B,M,J,E]. Returns
    [B,M,J,G,E].
    """
    scaled = queries * queries.shape[-1] ** -0.5
    shared = torch.einsum("bmjge,btje->bmjgt", scaled, keys).masked_fill(~visible[:, :, None, None], float("-inf"))
    private = [(scaled * key.unsqueeze(3)).sum(-1, keepdim=True) for key, _ in own]
    scores = torch.cat([shared, *private], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(values.dtype)
    length = keys.shape[1]
    mixed = torch.einsum("bmjgt,btje->bmjge", weights[..., :length], values)
    for index, (_, value) in enumerate(own):
        mixed = mixed + weights[..., length + index, None] * value.unsqueeze(3)
    return mixed


class Mlp(nn.Module):
    """down(SiLU(gate x) * up x)."""

    def __init__(self, size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        down: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return down


@dataclass
class RecurrentState(State):
    """Keys and values [B,capacity,J,E] of the `length` verified anchors, and the state the next draft starts from.

    `hidden` [B,1,D] is g of the latest draft position; drafts write behind `length` and are overwritten by `ingest`.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    length: int = 0
    hidden: Tensor | None = None

    def select(self, rows: Tensor) -> "RecurrentState":
        keys, values, hidden = (None if x is None else x[rows] for x in (self.keys, self.values, self.hidden))
        return RecurrentState(len(rows), keys, values, self.length, hidden)


class RecurrentHeads(Heads):
    """See the module. Trainable parameters: n_f D^2 + 2D (H + 2J) E + H E D + 3 D I + 4 D."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        assert config.block is not None, "recurrent heads need the shape of their block"
        size, eps = config.hidden_size, config.block.rms_norm_eps
        self.fc = nn.Linear(config.feature_size, size, bias=False)
        self.embed_norm = nn.RMSNorm(size, eps=eps)
        self.hidden_norm = nn.RMSNorm(size, eps=eps)
        self.attention = FusedAttention(size, config.block)
        self.mlp_norm = nn.RMSNorm(size, eps=eps)
        self.mlp = Mlp(size, config.block.intermediate_size)
        self.norm = nn.RMSNorm(size, eps=eps)

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """a = [norm_e(e(x)) ; norm_h(g)], embedding first: tokens [...], hidden [...,D] to [...,2D]."""
        return torch.cat([self.embed_norm(self.embed(tokens)), self.hidden_norm(hidden)], dim=-1)

    def _finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        """g^k from g^{k-1} [B,M,D] and the attention's mix [B,M,J,G,E]."""
        hidden = hidden + self.attention.output(mixed)
        updated: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return updated

    def _unroll(self, features: Tensor, next_tokens: Tensor, inputs: Tensor, anchors: Tensor) -> Tensor:
        fused = self.fc(features)
        positions = torch.arange(fused.shape[1], device=fused.device).expand(fused.shape[:2])
        shared_inputs = self._inputs(next_tokens, fused)
        keys, values = self.attention.keys_values(shared_inputs, positions)
        visible = positions.unsqueeze(1) <= anchors.unsqueeze(2)
        hidden, current = take_anchors(fused, anchors), take_anchors(shared_inputs, anchors)
        own: list[tuple[Tensor, Tensor]] = []
        states = []
        for step in range(self.config.draft_length):
            if step:
                current = self._inputs(inputs[:, :, step], hidden)
                own.append(self.attention.keys_values(current, anchors + step))
            queries = self.attention.queries(current, anchors + step)
            hidden = self._finish(hidden, attend(queries, keys, values, visible, own))
            states.append(self.norm(hidden))
        return torch.stack(states, dim=2)

    def new_state(self, batch_size: int) -> RecurrentState:
        return RecurrentState(batch_size)

    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        assert isinstance(state, RecurrentState)
        if not features.shape[1]:
            return
        fused = self.fc(features.to(self.precision))
        inputs = self._inputs(next_tokens, fused)
        state.hidden = self._extend(state, inputs, fused[:, -1:], state.length)
        state.length += features.shape[1]

    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        assert isinstance(state, RecurrentState)
        assert state.hidden is not None, "ingest() at least one anchor before drafting"
        if k > 1:
            inputs = self._inputs(previous.unsqueeze(1), state.hidden)
            state.hidden = self._extend(state, inputs, state.hidden, state.length + k - 2)
        return self.project(self.norm(state.hidden[:, 0]))

    def _extend(self, state: RecurrentState, inputs: Tensor, hidden: Tensor, start: int) -> Tensor:
        """Write keys of inputs [B,T,2D] at `start`, and return g [B,1,D] of the last one; only it needs a query."""
        batch, length = inputs.shape[:2]
        end = start + length
        positions = torch.arange(start, end, device=inputs.device).expand(batch, length)
        keys, values = self.attention.keys_values(inputs, positions)
        state.keys = write(state.keys, keys, start)
        state.values = write(state.values, values, start)
        queries = self.attention.queries(inputs[:, -1:], positions[:, -1:])
        mixed = nn.functional.scaled_dot_product_attention(
            queries[:, 0], state.keys[:, :end].transpose(1, 2), state.values[:, :end].transpose(1, 2)
        )
        return self._finish(hidden, mixed.unsqueeze(1))


def write(buffer: Tensor | None, rows: Tensor, start: int) -> Tensor:
    """Put rows [B,T,...] at `start` of a buffer [B,capacity,...], which doubles when full; returns the buffer."""
    end = start + rows.shape[1]
    if buffer is None or end > buffer.shape[1]:
        grown = rows.new_zeros(rows.shape[0], max(256, 2 * end), *rows.shape[2:])
        if buffer is not None:
            grown[:, :start] = buffer[:, :start]
        buffer = grown
    buffer[:, start:end] = rows
    return buffer
