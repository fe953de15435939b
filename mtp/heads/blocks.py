"""The transformer block of heads: attention with rotary positions, an MLP, and norms, of the type a `BlockShape` says.

Knows: the types that the common families of bases have, and how keys and values are kept between steps of decoding.
Refuses to know: which kind of heads uses a block, and which base its shape was read from.

Shapes: B batch, T position, M queries, D hidden, I MLP, H query heads, J key-value heads, G = H / J, E head size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtp.config import BlockShape
from mtp.layers import Linear, RMSNorm

Norm: TypeAlias = nn.RMSNorm | nn.LayerNorm
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def make_norm(size: int, shape: BlockShape) -> Norm:
    """A norm of the block's type."""
    return (RMSNorm if shape.norm == "rms" else nn.LayerNorm)(size, eps=shape.rms_norm_eps)


def frequencies(shape: BlockShape) -> Tensor:
    """Rotary frequencies [at most E/2] in float32 on the CPU, fastest first."""
    if shape.rope_frequencies is not None:
        return torch.tensor(shape.rope_frequencies, dtype=torch.float32, device="cpu")
    half = shape.head_dim // 2
    return shape.rope_theta ** (-torch.arange(half, dtype=torch.float32, device="cpu") / half)


@dataclass(frozen=True)
class Turn:
    """Cosines [B,T,1,2n] and sines [B,T,1,2n], those of the first half negated, of the angles at some positions."""

    cos: Tensor
    sin: Tensor


def turn(positions: Tensor, frequencies: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Turn:
    """What `rotate` multiplies by at positions [B,T]. For several blocks with the same frequencies it is the same."""
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(2)
    cos, sin = (scale * angles.cos()).to(dtype), (scale * angles.sin()).to(dtype)
    return Turn(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def rotate(heads: Tensor, by: Turn) -> Tensor:
    """Rotary embedding of heads [B,T,H,E]: pairs (i, i + n) of the first 2n entries. Su et al., arXiv 2104.09864."""
    width = by.cos.shape[-1]
    if not width:
        return heads
    turned = heads[..., :width]
    turned = turned * by.cos + turned.roll(width // 2, dims=-1) * by.sin
    return turned if width == heads.shape[-1] else torch.cat([turned, heads[..., width:]], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, from inputs of any width to width D; keys are never repeated."""

    def __init__(self, inputs: int, size: int, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = Linear(inputs, width, bias=shape.qkv_bias)
        self.k_proj = Linear(inputs, kv_width, bias=shape.qkv_bias)
        self.v_proj = Linear(inputs, kv_width, bias=shape.qkv_bias)
        self.o_proj = Linear(width, size, bias=shape.output_bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
            self.k_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        # Neither parameter nor buffer: a change of precision must leave frequencies in float32.
        self._frequencies = frequencies(shape)

    def queries(self, inputs: Tensor, positions: Tensor | Turn) -> Tensor:
        """Inputs [B,M,...] at positions [B,M], or turned by what they give, to [B,M,J,G,E]."""
        heads = self.q_proj(inputs).unflatten(-1, (self.shape.num_attention_heads, self.shape.head_dim))
        if self.shape.qk_norm:
            heads = self.q_norm(heads)
        batch, length = inputs.shape[:2]
        return self._rotate(heads, positions).view(
            batch, length, self.shape.num_key_value_heads, -1, self.shape.head_dim
        )

    def keys_values(self, inputs: Tensor, positions: Tensor | Turn) -> tuple[Tensor, Tensor]:
        """Inputs [B,T,...] at positions [B,T], or turned by what they give, to keys and values, each [B,T,J,E]."""
        split = (self.shape.num_key_value_heads, self.shape.head_dim)
        keys = self.k_proj(inputs).unflatten(-1, split)
        if self.shape.qk_norm:
            keys = self.k_norm(keys)
        return self._rotate(keys, positions), self.v_proj(inputs).unflatten(-1, split)

    def output(self, mixed: Tensor) -> Tensor:
        """[B,M,J,G,E] to [B,M,D]."""
        projected: Tensor = self.o_proj(mixed.flatten(2))
        return projected

    def turn(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """How queries and keys at positions [B,T] are rotated."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        return turn(positions, self._frequencies, dtype, self.shape.rope_scale)

    def _rotate(self, heads: Tensor, positions: Tensor | Turn) -> Tensor:
        return rotate(heads, positions if isinstance(positions, Turn) else self.turn(positions, heads.dtype))


def mix(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None = None) -> Tensor:
    """Softmax attention: queries [B,M,J,G,E] over keys and values [B,T,J,E] to [B,M,J,G,E].

    visible [B,M,T] says which keys a query sees; None: the queries stand at the last M positions and see all up to
    their own.
    """
    count, length = queries.shape[1], keys.shape[1]
    if visible is None and 1 < count < length:
        visible = queries.new_ones(count, length, dtype=torch.bool).tril(length - count).unsqueeze(0)
    mixed = F.scaled_dot_product_attention(
        queries.flatten(2, 3).transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=None if visible is None else visible.unsqueeze(1),
        is_causal=visible is None and count > 1,
        enable_gqa=True,
    )
    return mixed.transpose(1, 2).reshape(queries.shape)


class Mlp(nn.Module):
    """down(act(gate x) * up x), or without gate down(act(up x))."""

    def __init__(self, size: int, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        if shape.gated:
            self.gate_proj = Linear(size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = Linear(size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = Linear(shape.intermediate_size, size, bias=shape.mlp_bias)

    def forward(self, hidden: Tensor) -> Tensor:
        act = ACTIVATIONS[self.shape.activation]
        inner = act(self.gate_proj(hidden)) * self.up_proj(hidden) if self.shape.gated else act(self.up_proj(hidden))
        down: Tensor = self.down_proj(inner)
        return down


def add_mlp(hidden: Tensor, attended: Tensor, norm: nn.Module, mlp: Mlp) -> Tensor:
    """The second half of a block: its input and attention's output, each [B,M,D], to its output [B,M,D]."""
    after = hidden + attended
    added: Tensor = after + mlp(norm(hidden if mlp.shape.parallel_residual else after))
    return added


class Block(nn.Module):
    """A whole block on states of width D. Parameters: see `block_parameters`."""

    def __init__(self, size: int, shape: BlockShape) -> None:
        super().__init__()
        self.attention_norm = make_norm(size, shape)
        self.attention = Attention(size, size, shape)
        self.mlp_norm = make_norm(size, shape)
        self.mlp = Mlp(size, shape)

    def keys_values(self, hidden: Tensor, positions: Tensor | Turn) -> tuple[Tensor, Tensor]:
        """States [B,T,D] at positions [B,T] to keys and values, each [B,T,J,E]."""
        return self.attention.keys_values(self.attention_norm(hidden), positions)

    def forward(
        self, hidden: Tensor, positions: Tensor | Turn, shared: tuple[Tensor, Tensor], visible: Tensor | None = None
    ) -> Tensor:
        """States [B,M,D] at positions [B,M] to [B,M,D], looking at `shared` keys and values as `mix` says."""
        queries = self.attention.queries(self.attention_norm(hidden), positions)
        return add_mlp(hidden, self.attention.output(mix(queries, *shared, visible)), self.mlp_norm, self.mlp)


def block_parameters(size: int, shape: BlockShape, inputs: int | None = None) -> int:
    """How many parameters attention (inputs wide), MLP and their two norms have; `inputs` None is D.

    inputs (H + 2J) E + H E D + 3 D I + 2 D for Llama's type; biases, q and k norms, and an MLP without gate change it.
    """
    width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    attention = (inputs or size) * (width + 2 * kv_width) + width * size
    attention += shape.qkv_bias * (width + 2 * kv_width) + shape.output_bias * size + shape.qk_norm * 2 * shape.head_dim
    rows = (1 + shape.gated) * shape.intermediate_size
    mlp = rows * size + shape.intermediate_size * size + shape.mlp_bias * (rows + size)
    return attention + mlp + 2 * norm_parameters(size, shape)


def norm_parameters(size: int, shape: BlockShape) -> int:
    """How many parameters one norm has."""
    return size if shape.norm == "rms" else 2 * size


@dataclass
class KeyValues:
    """Keys and values [B,capacity,J,E] of one block; how many are valid is the owner's to know."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Put keys and values [B,T,J,E] at `start`; returns all up to their end."""
        self.keys, self.values = write(self.keys, keys, start), write(self.values, values, start)
        return self.first(start + keys.shape[1])

    def reserve(self, count: int, start: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Both buffers, with room for `count` positions from `start` on, for the caller to write; like [B,any,J,E]."""
        end = start + count
        self.keys, self.values = grown(self.keys, like, start, end), grown(self.values, like, start, end)
        return self.keys, self.values

    def first(self, end: int) -> tuple[Tensor, Tensor]:
        """The keys and values before `end`."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys[:, :end], self.values[:, :end]

    def select(self, rows: Tensor) -> "KeyValues":
        keys, values = (None if x is None else x[rows] for x in (self.keys, self.values))
        return KeyValues(keys, values)


def write(buffer: Tensor | None, rows: Tensor, start: int) -> Tensor:
    """Put rows [B,T,...] at `start` of a buffer [B,capacity,...], which doubles when full; returns the buffer."""
    end = start + rows.shape[1]
    buffer = grown(buffer, rows, start, end)
    buffer[:, start:end] = rows
    return buffer


def grown(buffer: Tensor | None, like: Tensor, start: int, end: int) -> Tensor:
    """The buffer [B,capacity,...], or a larger one with its first `start` positions; like [B,any,...]."""
    if buffer is not None and end <= buffer.shape[1]:
        return buffer
    larger = like.new_zeros(like.shape[0], max(256, 2 * end), *like.shape[2:])
    if buffer is not None:
        larger[:, :start] = buffer[:, :start]
    return larger
