"""Heads: training and decoding give the same logits, parameters are the formula's, rejected drafts leave nothing."""

import pytest
import torch
from torch import Tensor

from mtp.heads import Heads, RecurrentHeads, build_heads
from mtp.heads.recurrent import rotate
from tests.mtp.heads_toys import BLOCK, D, K, V, toy_config, toy_heads

KINDS = ("medusa", "recurrent")
TOLERANCE = 1e-6  # float64 with a float32 rotation


def sequence(heads: Heads, batch: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(batch, length, heads.config.feature_size, generator=generator).double()
    return features, torch.randint(0, V, (batch, length + K), generator=generator)


def draft_all(heads: Heads, state: object, tokens: Tensor, anchor: int) -> Tensor:
    """Logits [B,K,Vd] of a draft from `anchor` that happens to propose the sequence's own tokens."""
    return torch.stack([heads.draft(state, k, tokens[:, anchor + k]) for k in range(1, K + 1)], dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [None, torch.arange(3, 43, 2)])
@pytest.mark.parametrize("blocks", [(2, 1, 3, 2, 1), (9,), (1,) * 9])
def test_training_logits_equal_decoding_logits(kind: str, vocabulary: Tensor | None, blocks: tuple[int, ...]) -> None:
    heads = toy_heads(kind, vocabulary)
    features, tokens = sequence(heads)
    expected = heads(features, tokens)
    assert expected.shape == (2, 9, K, V if vocabulary is None else len(vocabulary))
    state, done = heads.new_state(2), 0
    for count in blocks:
        heads.ingest(state, features[:, done : done + count], tokens[:, done + 1 : done + count + 1])
        done += count
        drafted = draft_all(heads, state, tokens, done - 1)
        assert (drafted - expected[:, done - 1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_rejected_drafts_leave_nothing_behind(kind: str) -> None:
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    expected = heads(features, tokens)
    state = heads.new_state(2)
    for anchor in range(9):
        heads.ingest(state, features[:, anchor : anchor + 1], tokens[:, anchor + 1 : anchor + 2])
        for k in range(1, K + 1):  # propose other tokens than the sequence has
            heads.draft(state, k, (tokens[:, anchor + k] + 7) % V)
    heads.ingest(state, features[:, :0], tokens[:, :0])
    fresh = heads.new_state(2)
    heads.ingest(fresh, features, tokens[:, 1:10])
    assert (draft_all(heads, fresh, tokens, 8) - expected[:, 8]).abs().max() < TOLERANCE
    state = heads.new_state(2)
    heads.ingest(state, features[:, :5], tokens[:, 1:6])
    for k in range(1, K + 1):
        heads.draft(state, k, (tokens[:, k] + 7) % V)
    heads.ingest(state, features[:, 5:], tokens[:, 6:10])
    assert (draft_all(heads, state, tokens, 8) - expected[:, 8]).abs().max() < TOLERANCE


def test_recurrent_drafts_depend_on_what_was_drafted() -> None:
    """The negative control of the test above: another drafted token changes what follows."""
    heads = toy_heads("recurrent")
    features, tokens = sequence(heads)
    state = heads.new_state(2)
    heads.ingest(state, features, tokens[:, 1:10])
    heads.draft(state, 1, tokens[:, 9])
    other = heads.draft(state, 2, (tokens[:, 10] + 7) % V)
    assert (other - heads(features, tokens)[:, 8, 1]).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_no_position_sees_later_tokens(kind: str) -> None:
    """Draft position k of anchor t reads tokens up to t+k and features up to t: changing later ones changes nothing."""
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    before = heads(features, tokens)
    t = 4
    features[:, t + 1 :] += 1.0
    tokens[:, t + K + 1 :] = (tokens[:, t + K + 1 :] + 1) % V
    assert torch.equal(before[:, : t + 1], heads(features, tokens)[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], heads(features, tokens)[:, t + 1 :])


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_anchors_equal_all_anchors(kind: str) -> None:
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    anchors = torch.tensor([[1, 4, 5], [0, 8, 8]])
    some = heads.unroll(features, tokens, anchors)
    every = heads.unroll(features, tokens)
    rows = torch.arange(2).unsqueeze(1)
    assert (some - every[rows, anchors]).abs().max() < TOLERANCE


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_parameters(layers: int) -> None:
    heads = build_heads(toy_config("medusa", num_layers=layers))
    assert sum(p.numel() for p in heads.parameters()) == K * layers * (D * D + D)


@pytest.mark.parametrize("features", [(3,), (1, 2, 3)])
def test_recurrent_parameters(features: tuple[int, ...]) -> None:
    heads = build_heads(toy_config("recurrent", feature_layers=features))
    h, j, e, i = BLOCK.num_attention_heads, BLOCK.num_key_value_heads, BLOCK.head_dim, BLOCK.intermediate_size
    formula = len(features) * D * D + 2 * D * (h + 2 * j) * e + h * e * D + 3 * D * i + 4 * D
    assert sum(p.numel() for p in heads.parameters()) == formula


def test_medusa_starts_as_the_base() -> None:
    """Zero residuals: every head's logits are U h, the base's own next-token prediction."""
    heads = build_heads(toy_config("medusa"))
    output = torch.randn(V, D)
    heads.bind(torch.randn(V, D), output)
    features, tokens = torch.randn(1, 5, D), torch.zeros(1, 5 + K, dtype=torch.long)
    assert torch.allclose(heads(features, tokens), (features @ output.T).unsqueeze(2).expand(-1, -1, K, -1), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    heads(features, tokens).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in heads.parameters())


def test_rotation_depends_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = []
    for shift in (0, 5):
        q = rotate(query, torch.tensor([[7 + shift]]), 10_000.0)
        k = rotate(key, torch.tensor([[3 + shift]]), 10_000.0)
        scores.append(float((q * k).sum()))
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_state_grows_past_its_first_capacity() -> None:
    heads = toy_heads("recurrent")
    assert isinstance(heads, RecurrentHeads)
    generator = torch.Generator().manual_seed(2)
    length = 300
    features = torch.randn(1, length, heads.config.feature_size, generator=generator).double()
    tokens = torch.randint(0, V, (1, length + K), generator=generator)
    state = heads.new_state(1)
    for t in range(length):
        heads.ingest(state, features[:, t : t + 1], tokens[:, t + 1 : t + 2])
    last = heads.unroll(features, tokens, torch.tensor([[length - 1]]))
    drafted = draft_all(heads, state, tokens, length - 1)
    assert (drafted - heads.project(last)[:, 0]).abs().max() < 1e-5


def test_forgetting_to_bind_or_to_load_the_vocabulary_is_loud() -> None:
    heads = build_heads(toy_config("medusa"))
    with pytest.raises(AssertionError, match="bind"):
        heads.project(torch.zeros(1, D))
    with pytest.raises(ValueError, match="draft vocabulary is not set"):
        build_heads(toy_config("medusa", torch.arange(10))).bind(torch.zeros(V, D), torch.zeros(V, D))
    with pytest.raises(ValueError, match="need"):
        heads.bind(torch.zeros(V + 1, D), torch.zeros(V, D))


@pytest.mark.parametrize("kind", KINDS)
def test_select_copies_rows(kind: str) -> None:
    """Branches of a tree: each goes on as its own sequence, and neither writes into another or into the first state."""
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    state = heads.new_state(2)
    heads.ingest(state, features, tokens[:, 1:10])
    before = heads.draft(state, 1, tokens[:, 9])
    branches = state.select(torch.tensor([1, 0, 1]))
    assert branches.batch_size == 3
    assert type(branches) is type(state)
    assert torch.equal(heads.draft(branches, 1, tokens[[1, 0, 1], 9]), before[[1, 0, 1]])
    others = (tokens[[1, 0, 1], 10] + torch.tensor([0, 3, 7])) % V
    drafted = [heads.draft(branches, 2, others)]
    twigs = branches.select(torch.tensor([2, 0]))  # a branch of a branch
    more = (tokens[[1, 1], 11] + torch.tensor([5, 1])) % V
    drafted.append(heads.draft(twigs, 3, more))
    for row, branch in enumerate((2, 0)):
        alone = heads.new_state(1)
        heads.ingest(alone, features[1:], tokens[1:, 1:10])
        heads.draft(alone, 1, tokens[1:, 9])
        assert (heads.draft(alone, 2, others[branch : branch + 1])[0] - drafted[0][branch]).abs().max() < TOLERANCE
        assert (heads.draft(alone, 3, more[row : row + 1])[0] - drafted[1][row]).abs().max() < TOLERANCE
    heads.ingest(branches, features[[1, 0, 1]] + 1, tokens[[1, 0, 1], 1:10])  # nor does more text in a copy
    assert torch.equal(heads.draft(state, 1, tokens[:, 9]), before)
    rest = torch.stack([heads.draft(state, k, tokens[:, 8 + k]) for k in range(2, K + 1)], dim=1)
    assert (rest - heads(features, tokens)[:, 8, 1:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_select_of_an_empty_state(kind: str) -> None:
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    state = heads.new_state(1).select(torch.tensor([0, 0]))
    heads.ingest(state, features, tokens[:, 1:10])
    assert (heads.draft(state, 1, tokens[:, 9]) - heads(features, tokens)[:, 8, 0]).abs().max() < TOLERANCE
