"""Reading heads off a base: sizes of every family, the usual layers, and a start that is the base's own block."""

from pathlib import Path

import pytest
import torch

from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import RecurrentHeads
from mtp.initialise import describe, new_heads, start_from_base
from mtp.vocab import vocab_hash
from tests.tiny import FAMILIES, exact_base, tiny_base

PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
STARTED = PROJECTIONS | {"hidden_norm", "mlp_norm", "norm"}


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


def test_recurrent_heads_start_as_the_base_with_its_last_block_run_on_the_hidden_half() -> None:
    """Llama: fc passes the input of the last layer on, the block is that layer, so draft 1 starts as the base's own
    prediction of the next token, and only the attention's view of positions is the same by construction."""
    base = exact_base("llama")
    layer = base.num_layers - 1
    options = HeadsOptions(draft_length=1, feature_layers=(layer,))
    heads = new_heads(options, base).double().bind(base.embedding, base.output_matrix)
    tokens = torch.arange(3, 15).unsqueeze(0)
    output = base.forward(tokens, feature_layers=(layer,))
    logits = heads(output.features, torch.nn.functional.pad(tokens, (0, 1)))[:, :, 0]
    assert (logits - output.hidden @ base.output_matrix.T).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "expected"), [("llama", {"fc", *STARTED}), ("gpt2", {"fc"})])
def test_what_is_started_from_the_base(family: str, expected: set[str], tmp_path: Path) -> None:
    base = tiny_base(family, tmp_path)
    heads = new_heads(HeadsOptions(init_from_base=False), base)
    assert isinstance(heads, RecurrentHeads)
    assert set(start_from_base(heads, base)) == expected


def test_norms_stored_as_offsets_are_read_as_they_act(tmp_path: Path) -> None:
    """Gemma keeps an RMS weight w as w - 1."""
    base = tiny_base("gemma3", tmp_path)
    with torch.no_grad():
        base.final_norm.weight.fill_(0.5)
    heads = new_heads(HeadsOptions(), base)
    assert isinstance(heads, RecurrentHeads)
    assert torch.allclose(heads.norm.weight, torch.full_like(heads.norm.weight, 1.5), atol=1e-3)


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
