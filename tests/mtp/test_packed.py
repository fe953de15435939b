"""Packed rows: each text has the states it has alone, on bases that take places; others are refused by name."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.packed import packed_positions
from tests.tiny import FAMILIES, VOCAB_SIZE, exact_base, tiny_tokenizer

ROWS = [[13, 1, 16], [20, 20], [2, 3, 4, 5]]


def packed(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, segments) of rows of texts of these lengths, padded."""
    width = max(map(sum, rows)) + 3
    segments = torch.zeros(len(rows), width, dtype=torch.long)
    for row, lengths in enumerate(rows):
        for number, length in enumerate(lengths, start=1):
            start = sum(lengths[: number - 1])
            segments[row, start : start + length] = number
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, VOCAB_SIZE, segments.shape, generator=generator), segments


def largest_difference(base: FrozenBase, hidden: torch.Tensor, tokens: torch.Tensor, segments: torch.Tensor) -> float:
    """Between the states of each text in its row and alone."""
    worst = 0.0
    for row in range(len(tokens)):
        for number in range(1, int(segments[row].max()) + 1):
            own = segments[row] == number
            alone = base.forward(tokens[row : row + 1, own], feature_layers=(0, 2, 4)).features[0]
            worst = max(worst, float((alone - hidden[row, own]).abs().max()))
    return worst


@pytest.mark.parametrize("family", FAMILIES)
def test_each_text_has_the_states_it_has_alone(family: str) -> None:
    """Also where layers see a window of 8 positions, and texts are longer."""
    base = exact_base(family)
    tokens, segments = packed(ROWS)
    features = base.forward(tokens, feature_layers=(0, 2, 4), segments=segments).features
    assert bool(features.isfinite().all())
    assert largest_difference(base, features, tokens, segments) < 1e-10
    together = base.forward(tokens, feature_layers=(0, 2, 4)).features  # negative control
    assert largest_difference(base, together, tokens, segments) > 0.1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_every_attention_keeps_texts_apart(attention: str) -> None:
    base = exact_base("llama")
    base.model.set_attn_implementation(attention)
    tokens, segments = packed(ROWS)
    features = base.forward(tokens, feature_layers=(0, 2, 4), segments=segments).features
    assert largest_difference(base, features, tokens, segments) < 1e-4  # eager attention weighs in float32


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3))
def test_places_begin_at_0_in_each_text(rows: list[list[int]]) -> None:
    _, segments = packed(rows)
    places = packed_positions(segments)
    for row, lengths in enumerate(rows):
        expected = [place for length in lengths for place in range(length)]
        assert places[row].tolist() == expected + [0] * (segments.shape[1] - len(expected))


def other_base(kind: str, **fields: Any) -> FrozenBase:
    config = AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    return FrozenBase.from_model(model, tiny_tokenizer(), f"tiny-{kind}")


OTHERS = {
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4}, "takes no positions"),
    "opt": (
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}
        | {"max_position_embeddings": 64},
        "gets other states than alone",
    ),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_bases_that_mix_texts_are_refused(kind: str) -> None:
    fields, why = OTHERS[kind]
    base = other_base(kind, **fields)
    tokens, segments = packed([[3, 4]])
    with pytest.raises(UserError, match=rf"data.packing is true, which base 'tiny-{kind}' does not allow: .*{why}"):
        base.forward(tokens, segments=segments)
    with pytest.raises(UserError, match="set data.packing to false"):
        base.require_packing()
