"""The closed-form start: exact on a base that is linear, better than chance on a real one, and alive for training."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mtp.config import BlockShape
from mtp.errors import UserError
from mtp.heads import RecurrentHeads
from mtp.least_squares import Moments, reduced_rank, ridge, sharpest_pairs, start_from_states, unit
from tests.mtp.heads_toys import GPT2, NEOX, QWEN3, D, K, V, toy_heads

RANK = 16  # of the toy block: 2 key-value heads of 8


def linear_base(length: int = 600) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A base whose state follows y_{t+1} = y_t + M [n(e_{t+1}) ; n(y_t)] with a map of low rank: tokens, states [T,D],
    the embedding, and M."""
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(V, D, generator=generator, dtype=torch.float64) + 0.5
    mix = torch.randn(2 * D, RANK // 2, generator=generator, dtype=torch.float64) @ torch.randn(
        RANK // 2, D, generator=generator, dtype=torch.float64
    )
    tokens = torch.randint(0, V, (length,), generator=generator)
    state = torch.randn(D, generator=generator, dtype=torch.float64)
    states = [state]
    for token in tokens[1:]:
        step = torch.cat([unit(embedding[token]), unit(state)]) @ mix / 40
        state = 0.9 * (state + step) + 0.1
        states.append(state)
    return tokens, torch.stack(states), embedding, mix


def started(tokens: Tensor, states: Tensor, embedding: Tensor, **fields: object) -> RecurrentHeads:
    heads = toy_heads("recurrent", feature_layers=(4,), **fields)
    assert isinstance(heads, RecurrentHeads)
    for norm in (heads.embed_norm, heads.hidden_norm):
        torch.nn.init.ones_(norm.weight)
    heads.bind(embedding, embedding)
    moments = Moments(heads)
    moments.add(states[:-1], states[:-1], tokens[1:], states[1:])
    start_from_states(heads, moments)
    return heads


def drafts(heads: RecurrentHeads, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """Drafted final states [T,K,D], and those of the base they stand for."""
    length = len(tokens) - K
    hidden = heads.unroll(states[None, :length], tokens[None])[0]
    return hidden, torch.stack([states[k : length + k] for k in range(1, K + 1)], dim=1)


def misfit(drafted: Tensor, wanted: Tensor) -> list[float]:
    """1 - cosine similarity by draft position."""
    values: list[float] = (1 - torch.cosine_similarity(drafted, wanted, dim=-1)).mean(0).tolist()
    return values


ROTATING_NEOX = replace(NEOX, rope_frequencies=(1.0, 0.0464, 0.00215))
SHAPES: dict[str, dict[str, object]] = {
    "Llama": {},
    "Qwen3": {"block": replace(QWEN3, qkv_bias=True)},
    "EAGLE-3.1": {"eagle31_norms": True},
    "GPT-NeoX": {"block": ROTATING_NEOX},
    "GPT-NeoX, EAGLE-3.1": {"block": ROTATING_NEOX, "eagle31_norms": True},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_it_predicts_the_next_states_and_the_random_start_does_not(shape: str) -> None:
    tokens, states, embedding, _ = linear_base()
    close = misfit(*drafts(started(tokens, states, embedding, **SHAPES[shape]), tokens, states))
    random = toy_heads("recurrent", feature_layers=(4,))
    assert isinstance(random, RecurrentHeads)
    far = misfit(*drafts(random.bind(embedding, embedding), tokens, states))  # type: ignore[arg-type]
    assert max(close) < 0.05
    assert min(far) > 0.3


@pytest.mark.parametrize("shape", [GPT2, NEOX])
def test_blocks_that_cannot_tell_positions_apart_are_refused(shape: BlockShape) -> None:
    heads = toy_heads("recurrent", block=shape)
    assert isinstance(heads, RecurrentHeads)
    with pytest.raises(UserError, match="rope_frequencies.*start_positions: 0"):
        Moments(heads)


def test_every_part_can_still_learn() -> None:
    """Zeroed are only what a gradient reaches: after one step of descent every parameter has moved or will."""
    tokens, states, embedding, _ = linear_base()
    heads = started(tokens, states, embedding)
    drafted, wanted = drafts(heads, tokens, states)
    (drafted - wanted).square().sum().backward()
    silent = {name for name, p in heads.named_parameters() if p.grad is None or not p.grad.abs().sum()}
    assert silent <= {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp_norm.weight"}  # wake with down_proj


def test_ridge_and_reduced_rank_recover_a_map() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(500, 12, generator=generator, dtype=torch.float64)
    true = torch.randn(12, 3, generator=generator, dtype=torch.float64) @ torch.randn(3, 9, dtype=torch.float64)
    y = x @ true
    assert (ridge(x.T @ x, x.T @ y) - true).abs().max() < 0.01
    down, up = reduced_rank(x.T @ x, x.T @ y, 3)
    assert (down.shape, up.shape) == ((12, 3), (3, 9))
    assert (down @ up - true).abs().max() < 0.01
    down, up = reduced_rank(x.T @ x, x.T @ y, 2)  # negative control: rank two is not enough
    assert (down @ up - true).abs().max() > 0.1


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 1e4), (64, 1e4), (64, 1e5), (128, 5e5)])
def test_the_own_position_always_scores_highest(head_dim: int, theta: float) -> None:
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs, gap = sharpest_pairs(frequencies)
    for distance in range(1, 2000):
        assert pairs - float((distance * frequencies[:pairs]).cos().sum()) >= gap - 1e-9 > 0
