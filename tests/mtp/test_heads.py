"""Heads: training and decoding give the same logits, parameters are the formula's, rejected drafts leave nothing."""

import pytest
import torch
from torch import Tensor

from mtp.config import BlockShape
from mtp.heads import Heads, build_heads
from mtp.heads.blocks import block_parameters, frequencies, norm_parameters, rotate, turn
from tests.mtp.heads_toys import BLOCK, GPT2, NEOX, QWEN3, VARIANTS, D, K, V, toy_config, toy_heads

TOLERANCE = 1e-6  # float64 with a float32 rotation


def sequence(heads: Heads, batch: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(batch, length, heads.config.feature_size, generator=generator).double()
    return features, torch.randint(0, V, (batch, length + K), generator=generator)


def draft_all(heads: Heads, state: object, tokens: Tensor, anchor: int) -> Tensor:
    """Logits [B,K,Vd] of a draft from `anchor` that happens to propose the sequence's own tokens."""
    return torch.stack([heads.draft(state, k, tokens[:, anchor + k]) for k in range(1, K + 1)], dim=1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("vocabulary", [None, torch.arange(3, 43, 2)])
@pytest.mark.parametrize("blocks", [(2, 1, 3, 2, 1), (9,), (1,) * 9])
def test_training_logits_equal_decoding_logits(
    variant: str, vocabulary: Tensor | None, blocks: tuple[int, ...]
) -> None:
    heads = toy_heads(draft_ids=vocabulary, **VARIANTS[variant])
    features, tokens = sequence(heads)
    expected = heads(features, tokens)
    assert expected.shape == (2, 9, K, V if vocabulary is None else len(vocabulary))
    state, done = heads.new_state(2), 0
    for count in blocks:
        heads.ingest(state, features[:, done : done + count], tokens[:, done + 1 : done + count + 1])
        done += count
        drafted = draft_all(heads, state, tokens, done - 1)
        assert (drafted - expected[:, done - 1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_rejected_drafts_leave_nothing_behind(variant: str) -> None:
    heads = toy_heads(**VARIANTS[variant])
    features, tokens = sequence(heads)
    expected = heads(features, tokens)
    state = heads.new_state(2)
    for anchor in range(9):
        heads.ingest(state, features[:, anchor : anchor + 1], tokens[:, anchor + 1 : anchor + 2])
        for k in range(1, K + 1):  # propose other tokens than the sequence has
            heads.draft(state, k, (tokens[:, anchor + k] + 7) % V)
    heads.ingest(state, features[:, :0], tokens[:, :0])
    assert (draft_all(heads, state, tokens, 8) - expected[:, 8]).abs().max() < TOLERANCE
    fresh = heads.new_state(2)
    heads.ingest(fresh, features, tokens[:, 1:10])
    assert (draft_all(heads, fresh, tokens, 8) - expected[:, 8]).abs().max() < TOLERANCE
    state = heads.new_state(2)
    heads.ingest(state, features[:, :5], tokens[:, 1:6])
    for k in range(1, K + 1):
        heads.draft(state, k, (tokens[:, k] + 7) % V)
    heads.ingest(state, features[:, 5:], tokens[:, 6:10])
    assert (draft_all(heads, state, tokens, 8) - expected[:, 8]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", ["recurrent", "sequential", "hydra"])
def test_drafts_depend_on_what_was_drafted(kind: str) -> None:
    """The negative control of the test above: another drafted token changes what follows."""
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    state = heads.new_state(2)
    heads.ingest(state, features, tokens[:, 1:10])
    heads.draft(state, 1, tokens[:, 9])
    other = heads.draft(state, 2, (tokens[:, 10] + 7) % V)
    assert (other - heads(features, tokens)[:, 8, 1]).abs().max() > 0.01


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_position_sees_later_tokens(variant: str) -> None:
    """Draft position k of anchor t reads tokens up to t+k and features up to t: changing later ones changes nothing."""
    heads = toy_heads(**VARIANTS[variant])
    features, tokens = sequence(heads)
    before = heads(features, tokens)
    t = 4
    features[:, t + 1 :] += 1.0
    tokens[:, t + K + 1 :] = (tokens[:, t + K + 1 :] + 1) % V
    assert torch.equal(before[:, : t + 1], heads(features, tokens)[:, : t + 1])
    assert not torch.equal(before[:, t + 1 :], heads(features, tokens)[:, t + 1 :])


@pytest.mark.parametrize("variant", VARIANTS)
def test_chosen_anchors_equal_all_anchors(variant: str) -> None:
    heads = toy_heads(**VARIANTS[variant])
    features, tokens = sequence(heads)
    anchors = torch.tensor([[1, 4, 5], [0, 8, 8]])
    some = heads.unroll(features, tokens, anchors)
    every = heads.unroll(features, tokens)
    rows = torch.arange(2).unsqueeze(1)
    assert (some - every[rows, anchors]).abs().max() < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mixed", [True, False])
def test_half_precision(variant: str, mixed: bool) -> None:
    """Training under autocast, and heads whose weights are bfloat16: both roads run and agree to its precision."""
    heads = toy_heads(**VARIANTS[variant]).float()
    heads = heads if mixed else heads.bfloat16()
    features, tokens = sequence(heads)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        expected = heads(features.to(heads.precision), tokens)
    expected.float().square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in heads.parameters())
    state = heads.new_state(2)
    with torch.no_grad():
        heads.ingest(state, features, tokens[:, 1:10])
        drafted = draft_all(heads, state, tokens, 8)
    assert torch.cosine_similarity(drafted.float(), expected[:, 8].float(), dim=-1).min() > 0.98


# ---- several sequences in a row --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", [(4, 5), (1, 6, 2), (9,)])
def test_packed_sequences_equal_each_alone(variant: str, lengths: tuple[int, ...]) -> None:
    """All anchors but the last K of a sequence, which read the tokens of the next one."""
    heads = toy_heads(**VARIANTS[variant])
    features, tokens = sequence(heads)
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(2, -1)
    packed = heads.unroll(features, tokens, segments=segments)
    anchors = torch.tensor([[1, 4, 5], [0, 8, 8]])
    some = heads.unroll(features, tokens, anchors, segments)
    assert (some - packed[torch.arange(2).unsqueeze(1), anchors]).abs().max() < TOLERANCE
    start = 0
    for length in lengths:
        end = start + length
        alone = heads.unroll(features[:, start:end], tokens[:, start : end + K])
        assert (alone - packed[:, start:end]).abs().max() < TOLERANCE
        start = end


@pytest.mark.parametrize("kind", ["recurrent", "sequential", "parallel"])
def test_unpacked_rows_are_one_sequence(kind: str) -> None:
    """The negative control of the test above: without segments the second sequence sees the first."""
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    segments = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1]).expand(2, -1)
    apart, together = heads.unroll(features, tokens, segments=segments), heads.unroll(features, tokens)
    assert (apart - together)[:, :4].abs().max() < TOLERANCE
    assert (apart - together)[:, 4:].abs().amax(dim=(0, 2, 3)).min() > 0.01


# ---- parameters ------------------------------------------------------------------------------------------------------


def count(heads: Heads) -> int:
    return sum(p.numel() for p in heads.parameters())


@pytest.mark.parametrize("layers", [1, 2])
def test_medusa_and_hydra_parameters(layers: int) -> None:
    more = layers - 1
    assert count(build_heads(toy_config("medusa", num_layers=layers))) == K * layers * (D * D + D)
    formula = sum(2 * (k + 1) * D * D + D for k in range(1, K + 1)) + K * more * (D * D + D)
    assert count(build_heads(toy_config("hydra", num_layers=layers))) == formula


LLAMA_BLOCK = D * (4 + 2 * 2) * 8 + 4 * 8 * D + 3 * D * 48 + 2 * D  # D (H + 2J) E + H E D + 3 D I + 2 D


@pytest.mark.parametrize("features", [(3,), (1, 2, 3)])
def test_parameters_of_blocks_of_llama_type(features: tuple[int, ...]) -> None:
    recurrent = len(features) * D * D + LLAMA_BLOCK + D * (4 + 2 * 2) * 8 + 2 * D
    assert count(build_heads(toy_config("recurrent", feature_layers=features))) == recurrent
    with_norms = build_heads(toy_config("recurrent", feature_layers=features, eagle31_norms=True))
    assert count(with_norms) == recurrent + len(features) * D
    assert count(build_heads(toy_config("sequential"))) == K * (2 * D * D + LLAMA_BLOCK + 3 * D)
    assert count(build_heads(toy_config("parallel"))) == K * LLAMA_BLOCK + D


@pytest.mark.parametrize("shape", [BLOCK, QWEN3, NEOX, GPT2])
def test_parameters_of_every_type_of_block(shape: BlockShape) -> None:
    norm, block = norm_parameters(D, shape), block_parameters(D, shape)
    fused = 3 * D * D + block_parameters(D, shape, 2 * D) + 2 * norm
    assert count(build_heads(toy_config("recurrent", block=shape))) == fused
    assert count(build_heads(toy_config("sequential", block=shape))) == K * (2 * D * D + block + 3 * norm)
    assert count(build_heads(toy_config("parallel", block=shape))) == K * block + norm


def test_types_of_blocks_differ_by_what_their_names_say() -> None:
    assert block_parameters(D, BLOCK) == LLAMA_BLOCK
    assert block_parameters(D, QWEN3) == LLAMA_BLOCK + (4 + 2 * 2) * 8 + 2 * 8
    matrices = D * (4 + 2 * 4) * 8 + 4 * 8 * D + 2 * D * 48
    assert block_parameters(D, NEOX) == block_parameters(D, GPT2) == matrices + 12 * 8 + D + 48 + D + 4 * D


def test_medusa_starts_as_the_base() -> None:
    """Zero residuals: every head's logits are U h, the base's own next-token prediction."""
    heads = build_heads(toy_config("medusa"))
    output = torch.randn(V, D)
    heads.bind(torch.randn(V, D), output)
    features, tokens = torch.randn(1, 5, D), torch.zeros(1, 5 + K, dtype=torch.long)
    assert torch.allclose(heads(features, tokens), (features @ output.T).unsqueeze(2).expand(-1, -1, K, -1), atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_gets_a_gradient(variant: str) -> None:
    heads = toy_heads(**VARIANTS[variant])
    features, tokens = sequence(heads)
    heads(features, tokens).square().sum().backward()
    silent = {name for name, p in heads.named_parameters() if p.grad is None or not p.grad.abs().sum() > 1e-9}
    # Without rotation the bias of the keys adds the same to all scores of a query, so nothing depends on it.
    unrotated = heads.config.block is not None and heads.config.block.rope_frequencies == ()
    assert all(unrotated and name.endswith("k_proj.bias") for name in silent), silent


@pytest.mark.parametrize("kind", ["medusa", "sequential", "parallel", "hydra"])
def test_a_draft_position_teaches_its_own_part(kind: str) -> None:
    """A loss on draft position k alone reaches head k, and of the others only those it is computed from."""
    heads = toy_heads(kind)
    features, tokens = sequence(heads)
    for k in range(1, K + 1):
        heads.zero_grad()
        heads.unroll(features, tokens)[:, :, k - 1].square().sum().backward()
        parts = next(module for module in heads.children() if isinstance(module, torch.nn.ModuleList))
        reached = [any(p.grad is not None and p.grad.any() for p in part.parameters()) for part in parts]
        assert reached == [i == k or (i < k and kind == "sequential") for i in range(1, K + 1)]


def test_rotation_depends_on_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = []
    for shift in (0, 5):
        q = rotate(query, turn(torch.tensor([[7 + shift]]), frequencies(BLOCK), query.dtype))
        k = rotate(key, turn(torch.tensor([[3 + shift]]), frequencies(BLOCK), key.dtype))
        scores.append(float((q * k).sum()))
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


@pytest.mark.parametrize("kind", ["recurrent", "sequential", "parallel"])
def test_state_grows_past_its_first_capacity(kind: str) -> None:
    heads = toy_heads(kind)
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_select_copies_rows(variant: str) -> None:
    """Branches of a tree: each goes on as its own sequence, and neither writes into another or into the first state."""
    heads = toy_heads(**VARIANTS[variant])
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_select_of_an_empty_state(variant: str) -> None:
    heads = toy_heads(**VARIANTS[variant])
    features, tokens = sequence(heads)
    state = heads.new_state(1).select(torch.tensor([0, 0]))
    heads.ingest(state, features, tokens[:, 1:10])
    assert (heads.draft(state, 1, tokens[:, 9]) - heads(features, tokens)[:, 8, 0]).abs().max() < TOLERANCE
