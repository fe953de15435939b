"""Reading heads off a base: sizes of every family, and the usual layers."""

from pathlib import Path

import pytest
import torch

from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import describe, new_heads
from mtp.vocab import vocab_hash
from tests.tiny import FAMILIES, tiny_base


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
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
    assert describe(HeadsOptions(kind="medusa"), base).feature_layers == (4,)
    assert describe(HeadsOptions(), base).feature_layers == (1, 2)


@pytest.mark.parametrize("layers", [(5,), (-1,), (1, 1), ()])
def test_wrong_layers_are_named(layers: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="feature_layers"):
        describe(HeadsOptions(feature_layers=layers), tiny_base("llama", tmp_path))


def test_medusa_reads_one_layer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="medusa heads read one layer"):
        describe(HeadsOptions(kind="medusa", feature_layers=(1, 2)), tiny_base("llama", tmp_path))
