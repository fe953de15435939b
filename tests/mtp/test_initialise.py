"""Reading heads off a base: sizes of every family, and the usual layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.config import WITH_BLOCK, HeadsOptions
from mtp.errors import UserError
from mtp.heads import RecurrentHeads, SequentialHeads
from mtp.initialise import describe, new_heads
from mtp.vocab import vocab_hash
from tests.mtp.heads_toys import KINDS
from tests.tiny import FAMILIES, tiny_base


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_fit_every_family(family: str, kind: str, tmp_path: Path) -> None:
    base = tiny_base(family, tmp_path)
    ids = torch.arange(20)
    heads = new_heads(HeadsOptions(kind=kind, draft_length=2), base, ids)  # type: ignore[arg-type]
    assert heads.config.draft_vocab_hash == vocab_hash(ids)
    tokens = torch.arange(12).unsqueeze(0)
    features = base.forward(tokens, feature_layers=heads.config.feature_layers).features
    logits = heads(features, torch.nn.functional.pad(tokens, (0, 2)))
    assert logits.shape == (1, 12, 2, 20)
    assert bool(logits.isfinite().all())


def test_usual_layers(tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)

    def usual(**options: str) -> tuple[int, ...]:
        return describe(HeadsOptions(**options), base).feature_layers  # type: ignore[arg-type]

    assert usual() == (1, 2)
    assert [usual(kind=kind) for kind in ("medusa", "hydra", "sequential", "parallel")] == [(4,), (4,), (4,), (3,)]
    # Copies of the last block read what it reads.
    assert usual(init="base") == (2, 3)
    assert [usual(kind=kind, init="base") for kind in ("sequential", "parallel")] == [(3,), (3,)]


@pytest.mark.parametrize("layers", [(5,), (-1,), (1, 1), ()])
def test_wrong_layers_are_named(layers: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="feature_layers"):
        describe(HeadsOptions(feature_layers=layers), tiny_base("llama", tmp_path))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "recurrent"])
def test_other_kinds_than_recurrent_read_one_layer(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{kind} heads read one layer"):
        describe(HeadsOptions(kind=kind, feature_layers=(1, 2)), tiny_base("llama", tmp_path))  # type: ignore[arg-type]


WRONG_OPTIONS = (
    ({"kind": "eagle"}, "heads.kind is 'eagle'; allowed are medusa"),
    ({"init": "zero"}, "heads.init is 'zero'; allowed are random, base"),
    ({"num_layers": 2}, "heads.num_layers is 2.*use heads.kind: medusa or hydra"),
    ({"concat_order": "hidden_embed"}, "heads.concat_order is hidden_embed.*use heads.kind: sequential"),
    ({"kind": "sequential", "eagle31_norms": True}, "heads.eagle31_norms is True.*use heads.kind: recurrent"),
    ({"kind": "hydra", "init": "base"}, "heads.init is base.*recurrent or sequential or parallel"),
)


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        HeadsOptions(**options)


# ---- starting from the base ------------------------------------------------------------------------------------------


def first_positions(base: FrozenBase, **options: Any) -> tuple[Tensor, Tensor]:
    """Logits of heads that start from the base, [1,T,K,V], and the base's own [1,T,1,V], on seven tokens."""
    heads = new_heads(HeadsOptions(draft_length=2, init="base", **options), base)
    tokens = torch.tensor([[5, 60, 7, 33, 2, 41, 19]])
    output = base.forward(tokens, feature_layers=heads.config.feature_layers)
    logits = heads(output.features, torch.nn.functional.pad(tokens, (0, 2)))
    return logits.detach(), base.logits(output.hidden).unsqueeze(2)


COPIED = [family for family in FAMILIES if family != "gemma3"]


@pytest.mark.parametrize("family", COPIED)
def test_heads_that_start_from_the_base_start_as_the_base(family: str, tmp_path: Path) -> None:
    base = tiny_base(family, tmp_path)
    drafted, own = first_positions(base, kind="parallel")
    assert (drafted - own).abs().max() < 1e-4
    drafted, own = first_positions(base)
    assert (drafted[:, :, :1] - own).abs().max() < 1e-4
    # The norms of these two take away the length of each state, so that they only begin near the base.
    for options in ({"kind": "sequential"}, {"eagle31_norms": True}):
        drafted, own = first_positions(base, **options)
        assert torch.cosine_similarity(drafted[:, :, :1], own, dim=-1).min() > 0.8


def test_the_random_start_is_far_from_the_base(tmp_path: Path) -> None:
    """The negative control of the test above."""
    base = tiny_base("llama", tmp_path)
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(kind="sequential", draft_length=2), base)
    tokens = torch.tensor([[5, 60, 7, 33, 2, 41, 19]])
    output = base.forward(tokens, feature_layers=heads.config.feature_layers)
    drafted = heads(output.features, torch.nn.functional.pad(tokens, (0, 2)))[:, :, 0]
    assert torch.cosine_similarity(drafted, base.logits(output.hidden), dim=-1).min() < 0.5


def test_projections_start_as_the_identity_on_the_state(tmp_path: Path) -> None:
    base = tiny_base("qwen3", tmp_path)
    for order, state, token in (("embed_hidden", 32, 0), ("hidden_embed", 0, 32)):
        heads = new_heads(HeadsOptions(kind="sequential", init="base", concat_order=order), base)  # type: ignore[arg-type]
        assert isinstance(heads, SequentialHeads)
        for k in range(1, 5):
            weight = heads.depth(k).projection.weight
            assert torch.equal(weight[:, state : state + 32], torch.eye(32))
            assert not weight[:, token : token + 32].any()
    fused = new_heads(HeadsOptions(init="base", feature_layers=(3, 1)), base)
    assert isinstance(fused, RecurrentHeads)
    assert torch.equal(fused.fc.weight, torch.cat([torch.eye(32), torch.zeros(32, 32)], dim=1))


@pytest.mark.parametrize("kind", ["recurrent", "sequential", "parallel"])
def test_a_base_whose_block_cannot_be_copied_is_refused(kind: str, tmp_path: Path) -> None:
    base = tiny_base("gemma3", tmp_path)
    with pytest.raises(UserError, match="heads.init is 'base'.*gemma3.*4 norms.*heads.init: random"):
        new_heads(HeadsOptions(kind=kind, init="base"), base)  # type: ignore[arg-type]


# ---- learning --------------------------------------------------------------------------------------------------------


STARTS = [*((kind, "random") for kind in KINDS), *((kind, "base") for kind in WITH_BLOCK)]


@pytest.mark.parametrize(("kind", "init"), STARTS)
def test_a_periodic_text_is_learned_at_every_draft_position(kind: str, init: str, tmp_path: Path) -> None:
    base = tiny_base("qwen3", tmp_path)
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(kind=kind, draft_length=3, init=init), base)  # type: ignore[arg-type]
    period = torch.tensor([5, 60, 7, 33, 2])
    tokens = period.repeat(8)[None]
    features = base.forward(tokens[:, :-4], feature_layers=heads.config.feature_layers).features
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    targets = torch.stack([tokens[:, k + 1 : k + 1 + features.shape[1]] for k in (1, 2, 3)], dim=2)  # token t+k+1

    def logits() -> Tensor:
        drafted: Tensor = heads(features, tokens[:, :-1])
        return drafted

    for _ in range(40):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits().flatten(0, 2), targets.flatten()).backward()
        optimizer.step()
    assert torch.equal(logits().argmax(-1)[:, 5:], targets[:, 5:])
