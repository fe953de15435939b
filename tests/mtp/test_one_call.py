"""Blocks in one call of the kernels are blocks as torch computes them, and a row is the same in any company."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp.config import BlockShape
from mtp.heads.blocks import Block, KeyValues, Turn
from mtp.kernels import MOST_ROWS, Kernels
from mtp.layers import use_kernels
from mtp.one_call import OneCall, Past, Text, fits

SIZE = 24
SHAPE = BlockShape(intermediate_size=37, num_attention_heads=4, num_key_value_heads=2, head_dim=10)


class Reference:
    """Blocks computed by torch, one row after the other, with their own keys and values."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks, self.caches, self.length = blocks, [KeyValues() for _ in blocks], 0

    def rows(self, hidden: Tensor) -> Tensor:
        """[n, D] to [L + 1, n, D]."""
        states = [hidden[None]]
        positions = torch.arange(self.length, self.length + len(hidden))[None]
        for block, cache in zip(self.blocks, self.caches, strict=True):
            shared = cache.write(*block.keys_values(states[-1], positions), self.length)
            states.append(block(states[-1], positions, shared))
        self.length += len(hidden)
        return torch.cat(states)


def blocks_of(shape: BlockShape, layers: int, seed: int, half: bool) -> list[Block]:
    torch.manual_seed(seed)
    blocks = [Block(SIZE, shape).requires_grad_(False) for _ in range(layers)]
    for block in blocks:
        for parameter in block.parameters():
            parameter.copy_(parameter + 0.1 * torch.randn_like(parameter))  # norms and biases are not ones and zeros
            if half:
                parameter.copy_(parameter.bfloat16())
        use_kernels(block, None)
    return blocks


def buffers_of(blocks: list[Block], capacity: int, past: list[KeyValues], length: int) -> list[tuple[Tensor, Tensor]]:
    """Buffers that hold the first `length` places of `past`, and nothing that is a number behind them."""
    shape, made = blocks[0].attention.shape, []
    for cache in past:
        keys, values = torch.full((2, 1, capacity, shape.num_key_value_heads, shape.head_dim), torch.nan)
        if length:
            keys[:, :length], values[:, :length] = cache.first(length)
        made.append((keys, values))
    return made


def empty(blocks: list[Block], rows: int) -> Past:
    shape = blocks[0].attention.shape
    return Past(buffers_of(blocks, rows, [KeyValues() for _ in blocks], 0), strides(shape), [Text(rows, 0)])


def strides(shape: BlockShape) -> tuple[int, int]:
    return shape.head_dim, shape.num_key_value_heads * shape.head_dim


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, MOST_ROWS),
    length=st.sampled_from([0, 1, 40, 62, 63, 64, 65, 150]),  # about the places whose scores belong together
    layers=st.integers(1, 3),
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    head_dim=st.sampled_from([4, 10, 64, 72]),
    options=st.fixed_dictionaries({"qk_norm": st.booleans(), "qkv_bias": st.booleans(), "mlp_bias": st.booleans()}),
    half=st.booleans(),
    threads=st.integers(1, 3),
)
def test_rows_behind_a_text(
    any_kernels: Kernels,
    rows: int,
    length: int,
    layers: int,
    heads: tuple[int, int],
    head_dim: int,
    options: dict[str, bool],
    half: bool,
    threads: int,
) -> None:
    """States are torch's, keys and values too, and each row alone gives the same bits."""
    shape = replace(SHAPE, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=head_dim, **options)
    blocks = blocks_of(shape, layers, rows + length, half)
    reference, hidden = Reference(blocks), torch.randn(length + rows, SIZE)
    if length:
        reference.rows(hidden[:length])
    buffers = buffers_of(blocks, length + rows + 5, reference.caches, length)
    wanted = reference.rows(hidden[length:])
    for block in blocks:
        use_kernels(block, any_kernels, compacted=half)
    one_call, before = OneCall(any_kernels, blocks, SIZE), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        turn = blocks[0].attention.turn(torch.arange(length, length + rows)[None], torch.float32)
        found = one_call.run(hidden[length:], turn, Past(buffers, strides(shape), [Text(rows, length)]))
        again, alone = buffers_of(blocks, length + rows + 5, reference.caches, length), []
        for row in range(length, length + rows):
            turn = blocks[0].attention.turn(torch.tensor([[row]]), torch.float32)
            alone.append(one_call.run(hidden[row : row + 1], turn, Past(again, strides(shape), [Text(1, row)])))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
    assert found.equal(torch.cat(alone, dim=1))
    for (keys, values), cache in zip(buffers, reference.caches, strict=True):
        for ours, theirs in zip((keys, values), cache.first(length + rows), strict=True):
            torch.testing.assert_close(ours[:, : length + rows], theirs, atol=2e-4, rtol=1e-4)
            assert bool(ours[:, length + rows :].isnan().all())  # nothing is written, or read, behind the rows


def test_rows_of_a_tree_see_their_ancestors_only(kernels: Kernels) -> None:
    """Row 0 has the children 1 and 2, row 2 the child 3: paths give what they give as texts."""
    [block] = blocks_of(SHAPE, 1, 0, half=False)
    one_call, hidden = OneCall(kernels, [block], SIZE), torch.randn(4, SIZE)
    visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    turn = block.attention.turn(torch.tensor([[0, 1, 1, 2]]), torch.float32)
    found = one_call.run(hidden, turn, empty([block], 4), visible)
    for path in ([0, 1], [0, 2, 3]):
        wanted = Reference([block]).rows(hidden[path])
        torch.testing.assert_close(found[:, path], wanted, atol=1e-5, rtol=1e-4)


def test_what_is_no_number_stays_in_its_row(kernels: Kernels) -> None:
    """A row that overflowed shows as such, and rows that do not see it are untouched."""
    [block] = blocks_of(SHAPE, 1, 0, half=False)
    one_call, hidden = OneCall(kernels, [block], SIZE), torch.randn(3, SIZE)
    turn = block.attention.turn(torch.arange(3)[None], torch.float32)
    sound = one_call.run(hidden, turn, empty([block], 3))
    hidden[1, 0] = torch.nan
    found = one_call.run(hidden, turn, empty([block], 3))
    assert found[1, 0].equal(sound[1, 0])
    assert bool(found[1, 1:].isnan().all())


@pytest.mark.parametrize(
    "change", [{"norm": "layer"}, {"gated": False}, {"activation": "gelu"}, {"parallel_residual": True}]
)
def test_other_types_do_not_fit(change: dict[str, object]) -> None:
    assert fits(Block(SIZE, SHAPE))
    assert not fits(Block(SIZE, replace(SHAPE, **change)))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_do_not_fit(dtype: torch.dtype) -> None:
    assert not fits(Block(SIZE, SHAPE).to(dtype))


@pytest.mark.parametrize("threads", [1, 3])
def test_several_texts_each_as_if_alone(kernels: Kernels, threads: int) -> None:
    """Of different lengths and numbers of rows, each in places of its own: the same bits as one after the other."""
    blocks = blocks_of(SHAPE, 2, 0, half=False)
    one_call, before = OneCall(kernels, blocks, SIZE), torch.get_num_threads()
    lengths, rows, capacity = (0, 70, 3, 64, 129), (3, 1, 4, 2, 1), 140
    heads, size = SHAPE.num_key_value_heads, SHAPE.head_dim
    filled = [tuple(torch.randn(2, len(lengths), heads, capacity, size)) for _ in blocks]
    hidden = torch.randn(sum(rows), SIZE)
    turn = blocks[0].attention.turn(
        torch.tensor([[length + r for length, n in zip(lengths, rows, strict=True) for r in range(n)]]), torch.float32
    )
    starts = [(2 * n + 1) * size for n in range(len(lengths))]  # places in front that belong to nobody
    texts = [
        Text(n, length, number * heads * capacity * size + start)
        for number, (n, length, start) in enumerate(zip(rows, lengths, starts, strict=True))
    ]
    torch.set_num_threads(threads)
    try:
        buffers = [(keys.clone(), values.clone()) for keys, values in filled]
        found = one_call.run(hidden, turn, Past(buffers, (capacity * size, size), texts))
        alone, at = [], 0
        for text in texts:
            part = slice(at, at := at + text.rows)
            own = Turn(turn.cos[:, part], turn.sin[:, part])
            copies = [(keys.clone(), values.clone()) for keys, values in filled]
            alone.append(one_call.run(hidden[part], own, Past(copies, (capacity * size, size), [text])))
    finally:
        torch.set_num_threads(before)
    assert found.equal(torch.cat(alone, dim=1))


@pytest.mark.parametrize("scale", [30.0, 300.0, 1e4])
def test_large_states_saturate_as_in_torch(any_kernels: Kernels, scale: float) -> None:
    """Gates and scores far beyond what the exponential can hold, of either sign."""
    [block] = blocks_of(replace(SHAPE, qkv_bias=True), 1, 0, half=False)
    block.mlp.gate_proj.weight.mul_(scale)
    block.attention.q_proj.weight.mul_(scale)
    hidden = torch.randn(5, SIZE)
    wanted = Reference([block]).rows(hidden)
    turn = block.attention.turn(torch.arange(5)[None], torch.float32)
    found = OneCall(any_kernels, [block], SIZE).run(hidden, turn, empty([block], 5))
    torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-3)
    assert float(block.mlp.gate_proj(block.mlp_norm(wanted[0])).min()) < -20


def test_several_python_threads(kernels: Kernels) -> None:
    blocks = blocks_of(SHAPE, 2, 0, half=False)
    one_call, states = OneCall(kernels, blocks, SIZE), torch.randn(8, 9, SIZE)
    turn = blocks[0].attention.turn(torch.arange(9)[None], torch.float32)

    def run(hidden: Tensor) -> Tensor:
        return one_call.run(hidden, turn, empty(blocks, 9))

    wanted = [run(hidden) for hidden in states]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert all(one.equal(other) for one, other in zip(pool.map(run, states), wanted, strict=True))
