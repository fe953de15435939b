"""Blocks of Llama's type over a few rows in one call of the kernels, instead of some thirty of torch for each.

Knows: what `kernels.c` needs to know of blocks and caches, and which types of blocks it computes. Refuses to know:
which cache is whose, how far it is filled, and what the states are for.

Shapes: n rows, D hidden, H query heads, J key-value heads, E head size, L blocks.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from mtp.kernels import Kernels, Matrix, mark, plain
from mtp.layers import Linear

if TYPE_CHECKING:  # heads use this module, and whoever is imported first must find the other whole
    from mtp.heads.blocks import Attention, Mlp, Turn

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int
_NORMS = ("attention_norm", "q_norm", "k_norm", "mlp_norm")
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_SIZES = ("hidden", "heads", "kv_heads", "head", "rotated", "inner", "head_stride", "place_stride")


class _Layer(ctypes.Structure):
    _fields_ = [(name, _POINTER) for name in _NORMS]
    _fields_ += [(name, Matrix) for name in _MATRICES]
    _fields_ += [("keys", _POINTER), ("values", _POINTER)]


class _Text(ctypes.Structure):
    _fields_ = [
        ("first", _INT),
        ("n", _INT),
        ("past", _LONG),
        ("offset", _LONG),
        ("keys", _POINTER),
        ("values", _POINTER),
    ]


class _Shape(ctypes.Structure):
    _fields_ = [*((name, _LONG) for name in _SIZES), ("eps", ctypes.c_float)]


class Parts(Protocol):
    """What a block consists of, besides the norm before its attention, which is not needed with inputs of its own."""

    attention: Attention
    mlp_norm: Any
    mlp: Mlp


@dataclass(frozen=True)
class Text:
    """`rows` rows of one text, behind `length` places that begin at number `offset` of the buffers."""

    rows: int
    length: int
    offset: int = 0
    buffers: tuple[Tensor, Tensor] | None = None
    """Of its own, in place of those of the only block."""


@dataclass(frozen=True)
class Past:
    """Buffers of keys and values for each block, of any layout whose heads and places are `strides` numbers apart; the
    places of each text are read, and as many as it has rows are written behind them."""

    buffers: Sequence[tuple[Tensor, Tensor]]
    strides: tuple[int, int]
    texts: Sequence[Text]


class OneCall:
    """L blocks, whose weights are held as they are now; see `current`. One call at a time."""

    def __init__(self, kernels: Kernels, blocks: Sequence[Parts], size: int) -> None:
        assert all(fits(block) for block in blocks)
        self.kernels, self.blocks = kernels, list(blocks)
        shape = blocks[0].attention.shape
        self._shape = _Shape(
            hidden=size,
            heads=shape.num_attention_heads,
            kv_heads=shape.num_key_value_heads,
            head=shape.head_dim,
            inner=shape.intermediate_size,
            eps=shape.rms_norm_eps,
        )
        self._lock = threading.Lock()
        self._parameters = [weight for block in blocks for weight in _parameters(block)]
        self._marks = list(map(mark, self._parameters))
        self._held = [weight for block in blocks for weight in _weights(block)]  # C knows their places only
        self._layers = (_Layer * len(blocks))(*map(_layer, blocks))
        self._scratch = torch.empty(0)
        self._blocks, self._needed = kernels.library.blocks, kernels.library.scratch
        texts = (ctypes.POINTER(_Text), _INT)
        self._needed.argtypes = [ctypes.POINTER(_Shape), _INT, *texts, _INT]
        self._needed.restype = _LONG
        self._blocks.argtypes = [
            *(ctypes.POINTER(_Shape), ctypes.POINTER(_Layer), _INT, _INT, *texts),
            *(_POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT),
        ]
        self._blocks.restype = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _none, ()  # copies of blocks have weights of their own

    def current(self) -> bool:
        """Whether the blocks still have the weights that they had."""
        return self._marks == list(map(mark, self._parameters))

    def run(
        self, hidden: Tensor, turn: Turn, past: Past, visible: Tensor | None = None, inputs: Tensor | None = None
    ) -> Tensor:
        """States [L + 1, n, D]: what each block reads, and what the last one writes, for rows hidden [n, D], text by
        text.

        turn: of their positions. visible [n, any] bool: which of the last places each row of the only text sees, the
        rows' own included, besides all before these; None is those up to itself. inputs [n, any]: what attention reads
        of the only block, in place of its normalised state.
        """
        rows, threads, texts = len(hidden), torch.get_num_threads(), _texts(past.texts)
        assert sum(text.rows for text in past.texts) == rows
        assert visible is None or len(past.texts) == 1
        assert len(self.blocks) == 1 or all(text.buffers is None for text in past.texts)
        seen = None if visible is None else visible.to(torch.uint8).contiguous()
        states = hidden.new_empty(len(self.blocks) + 1, *hidden.shape)
        states[0] = hidden
        cos, sin = turn.cos.contiguous(), turn.sin.contiguous()
        inputs = None if inputs is None else inputs.contiguous()
        with self._lock:
            self._shape.rotated = cos.shape[-1]
            self._shape.head_stride, self._shape.place_stride = past.strides
            for layer, (keys, values) in zip(self._layers, past.buffers, strict=True):
                layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            scratch = self._room(self._needed(self._shape, rows, texts, len(texts), threads))
            self._blocks(
                *(self._shape, self._layers, len(self.blocks), rows, texts, len(texts)),
                *(_place(inputs), cos.data_ptr(), sin.data_ptr(), _place(seen)),
                0 if seen is None else seen.shape[1],
                *(states.data_ptr(), scratch.data_ptr(), threads),
            )
        return states

    def _room(self, size: int) -> Tensor:
        if self._scratch.numel() < size:
            self._scratch = torch.empty(2 * size)
        return self._scratch


def _none() -> None:
    return None


def _parameters(block: Parts) -> list[Tensor]:
    parts = (getattr(block, "attention_norm", None), block.attention, block.mlp_norm, block.mlp)
    return [weight for part in parts if part is not None for weight in part.parameters()]


def _weights(block: Parts) -> list[Tensor]:
    """All that C is told the place of."""
    linears = [part for owner in (block.attention, block.mlp) for part in owner.children() if isinstance(part, Linear)]
    return [*_parameters(block), *(linear.compacted for linear in linears if linear.compacted is not None)]


def fits(block: Parts) -> bool:
    """Whether the kernels compute a block of this type, with these weights."""
    shape = block.attention.shape
    llama = shape.norm == "rms" and shape.gated and shape.activation == "silu" and not shape.parallel_residual
    weights = _parameters(block)
    return llama and all(w.dtype == torch.float32 and w.device.type == "cpu" and plain(w) for w in weights)


def _layer(block: Parts) -> _Layer:
    attention, mlp = block.attention, block.mlp
    owners = (block, attention, attention, block)
    norms = [getattr(owner, name, None) for owner, name in zip(owners, _NORMS, strict=True)]
    linears = [getattr(attention if name in "qkvo" else mlp, f"{name}_proj") for name in _MATRICES]
    return _Layer(*(None if norm is None else norm.weight.data_ptr() for norm in norms), *map(_matrix, linears))


def _matrix(linear: Linear) -> Matrix:
    compacted = linear.compacted
    return Matrix.of(linear.weight if compacted is None else compacted, linear.bias)


def _texts(texts: Sequence[Text]) -> Any:
    first = accumulate((text.rows for text in texts), initial=0)
    return (_Text * len(texts))(
        *(
            _Text(start, text.rows, text.length, text.offset, *map(_place, text.buffers or (None, None)))
            for start, text in zip(first, texts, strict=False)
        )
    )


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
