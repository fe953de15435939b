"""Foreign formats: the round trip gives the heads' logits; what is not whole, or cannot be said, is refused by name."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats import export as export_module
from mtp.formats.catalogue import FORMATS
from mtp.formats.export import export
from mtp.formats.interface import Content, Lent
from mtp.formats.medusa_reader import OUTSIDE, read_vllm
from mtp.formats.tensors import CARD, CONFIG, RECORD
from mtp.heads import Heads
from mtp.hub import load_heads, save_heads
from tests.mtp.format_toys import VOCABULARY, base_for_formats, heads_on
from tests.tiny import VOCAB_SIZE

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vllm-medusa": ("vllm-medusa", "medusa", {}),
    "vllm-medusa, three layers": ("vllm-medusa", "medusa", {"num_layers": 3}),
    "vllm-medusa, draft vocabulary": ("vllm-medusa", "medusa", {"draft_ids": VOCABULARY}),
    "vllm-medusa, own output": ("vllm-medusa", "medusa", {"own_output": "one", "draft_ids": VOCABULARY}),
    "vllm-medusa, an output each": ("vllm-medusa", "medusa", {"own_output": "each", "draft_ids": VOCABULARY}),
    "medusa": ("medusa", "medusa", {}),
    "medusa, an output each": ("medusa", "medusa", {"own_output": "each"}),
    "eagle3, own output": ("eagle3", "recurrent", {"own_output": "one", "draft_ids": VOCABULARY}),
    "eagle3": ("eagle3", "recurrent", {}),
    "eagle3, draft vocabulary": ("eagle3", "recurrent", {"draft_ids": VOCABULARY}),
    "eagle3, EAGLE-3.1": ("eagle3", "recurrent", {"eagle31_norms": True, "draft_ids": VOCABULARY}),
    "speculators": ("speculators", "recurrent", {"draft_ids": VOCABULARY}),
}
STRICT_TOO = {"custom_generate": ("custom_generate", "recurrent", {"draft_ids": VOCABULARY, "own_output": "one"})}
STRICT = ["vllm-medusa, draft vocabulary", "medusa", "eagle3, EAGLE-3.1", "speculators", *STRICT_TOO]
OPTIONAL = {"t2d"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return base_for_formats(tmp_path_factory.mktemp("formats"))


def made(case: str, base: FrozenBase) -> tuple[str, Heads]:
    name, kind, fields = (CASES | STRICT_TOO)[case]
    return name, heads_on(base, kind, **fields)


def weights(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_round_trip(case: str, dtype: str, base: FrozenBase, tmp_path: Path) -> None:
    name, heads = made(case, base)
    done = export(heads, base, name, tmp_path / "out", dtype=dtype)
    assert done.compared == heads.config.draft_length * heads.config.proposals
    assert done.worst < 1e-4 < 0.1 < done.scale
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        CONFIG,
        CARD,
        RECORD,
        weights(tmp_path / "out").name,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    stored = {tensor.dtype for tensor in load_file(weights(tmp_path / "out")).values() if tensor.is_floating_point()}
    assert stored == {getattr(torch, dtype)}
    card = (tmp_path / "out" / CARD).read_text()
    assert FORMATS[name].written_for in card
    assert base.name in card


def test_feature_layers_are_counted_as_each_engine_counts(base: FrozenBase, tmp_path: Path) -> None:
    export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out")
    document = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert document["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]  # vLLM: the input of layer i
    assert document["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]  # SGLang: the output of layer i
    assert document["norm_before_residual"] is False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_s_medusa_never_drafts_a_token_outside(base: FrozenBase, tmp_path: Path, dtype: str) -> None:
    """Its output matrix has a row for each token; whatever the state, the largest product is one of the vocabulary's:
    also where all of these are negative, and zeros in place of the other rows would win."""
    heads = heads_on(base, "medusa", VOCABULARY)
    folder = export(heads, base, "vllm-medusa", tmp_path / "out", dtype=dtype).folder
    document = json.loads((folder / CONFIG).read_text())
    assert (document["truncated_vocab_size"], document[OUTSIDE]) == (VOCAB_SIZE, 1)
    matrix = load_file(weights(folder))["lm_heads.0.weight"].float()
    assert matrix.shape == (VOCAB_SIZE, base.hidden_size)
    negative = torch.linalg.pinv(matrix[VOCABULARY]) @ -torch.linspace(1, 2, len(VOCABULARY))
    states = torch.cat([torch.randn(2000, base.hidden_size), negative[None], -matrix, matrix])
    assert torch.isin((states @ matrix.T).argmax(-1), VOCABULARY).all()
    zeros = refilled(matrix, OTHERS, 0.0)
    assert not torch.isin((states @ zeros.T).argmax(-1), VOCABULARY).all()


def test_a_token_map_is_still_read(base: FrozenBase, tmp_path: Path) -> None:
    """The layout of older folders: as many output rows as the draft vocabulary has tokens."""
    heads = heads_on(base, "medusa", VOCABULARY)
    folder = export(heads, base, "vllm-medusa", tmp_path / "out").folder
    whole, path = read_vllm(folder), weights(folder)
    tensors = load_file(path)
    rows = {"lm_heads.0.weight": tensors["lm_heads.0.weight"][VOCABULARY].contiguous(), "token_map": VOCABULARY}
    save_file(tensors | rows, path)
    document = json.loads((folder / CONFIG).read_text()) | {"truncated_vocab_size": len(VOCABULARY)}
    (folder / CONFIG).write_text(json.dumps(document))
    with pytest.raises(UserError, match="outside_draft_vocabulary is for whole output matrices"):
        read_vllm(folder)
    del document[OUTSIDE]
    (folder / CONFIG).write_text(json.dumps(document))
    found = read_vllm(folder)
    assert found.draft_ids is not None
    assert torch.equal(found.draft_ids, VOCABULARY)
    assert all(torch.equal(one, other) for one, other in zip(found.outputs, whole.outputs, strict=True))


@pytest.mark.parametrize("case", STRICT)
def test_every_tensor_must_be_there_alone_and_of_its_shape(case: str, base: FrozenBase, tmp_path: Path) -> None:
    """Dropping, misshaping, retyping or doubling any one tensor is refused with its name."""
    name, heads = made(case, base)
    folder = export(heads, base, name, tmp_path / "out").folder
    path, read = weights(folder), FORMATS[name].read
    whole = load_file(path)
    assert len(whole) > 6
    read(folder)
    for tensor_name in whole:
        for tensors in spoiled(whole, tensor_name):
            save_file(tensors, path)
            if tensor_name in OPTIONAL and tensor_name not in tensors:
                read(folder)
                continue
            with pytest.raises(UserError) as told:
                read(folder)
            assert tensor_name in str(told.value)
            assert "expected" in str(told.value) or "is not of this format" in str(told.value)


def spoiled(whole: dict[str, Tensor], name: str) -> Iterator[dict[str, Tensor]]:
    tensor = whole[name]
    yield {other: value for other, value in whole.items() if other != name}
    yield whole | {name: torch.cat([tensor, tensor[:1]])}
    yield whole | {name: tensor.unsqueeze(0)}
    yield whole | {name: tensor.to(torch.int32)}
    yield whole | {f"{name}.more": tensor.clone()}


def halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)


OTHERS = [token for token in range(VOCAB_SIZE) if token not in VOCABULARY]


def refilled(matrix: Tensor, tokens: list[int], value: float) -> Tensor:
    changed = matrix.clone()
    changed[tokens] = value
    return changed


FAULTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "halves of q exchanged": (
        "eagle3",
        lambda t: {"midlayer.self_attn.q_proj.weight": halves(t["midlayer.self_attn.q_proj.weight"])},
        "other logits",
    ),
    "halves of v exchanged": (
        "speculators",
        lambda t: {"layers.0.self_attn.v_proj.weight": halves(t["layers.0.self_attn.v_proj.weight"])},
        "other logits",
    ),
    "rows of k permuted": (
        "eagle3",
        lambda t: {"midlayer.self_attn.k_proj.weight": t["midlayer.self_attn.k_proj.weight"].roll(1, 0)},
        "other logits",
    ),
    "gate and up exchanged": (
        "eagle3",
        lambda t: {
            "midlayer.mlp.gate_proj.weight": t["midlayer.mlp.up_proj.weight"],
            "midlayer.mlp.up_proj.weight": t["midlayer.mlp.gate_proj.weight"],
        },
        "other logits",
    ),
    "norms exchanged": (
        "eagle3",
        lambda t: {
            "midlayer.input_layernorm.weight": t["midlayer.hidden_norm.weight"],
            "midlayer.hidden_norm.weight": t["midlayer.input_layernorm.weight"],
        },
        "other logits",
    ),
    "feature layers in another order": ("eagle3", lambda t: {"fc.weight": t["fc.weight"].roll(32, 1)}, "other logits"),
    "rows of lm_head shifted": ("eagle3", lambda t: {"lm_head.weight": t["lm_head.weight"].roll(1, 0)}, "other logits"),
    "ids in place of offsets": ("eagle3", lambda t: {"d2t": VOCABULARY}, "d2t .* leads to id"),
    "another vocabulary": (
        "eagle3",
        lambda t: {"d2t": t["d2t"] - t["d2t"]},
        "t2d and d2t name different draft vocabularies",
    ),
    "t2d of another vocabulary": ("eagle3", lambda t: {"t2d": t["t2d"].roll(1)}, "t2d and d2t"),
    "both of another vocabulary": (
        "eagle3",
        lambda t: {"d2t": 0 * t["d2t"], "t2d": torch.arange(len(t["t2d"])) < len(t["d2t"])},
        "proposes from other tokens",
    ),
    "a matrix transposed": (
        "vllm-medusa",
        lambda t: {"blocks.1.layers.0.weight": t["blocks.1.layers.0.weight"].T.contiguous()},
        "other logits",
    ),
    "heads exchanged": (
        "medusa",
        lambda t: {"0.0.linear.weight": t["1.0.linear.weight"], "1.0.linear.weight": t["0.0.linear.weight"]},
        "other logits",
    ),
    "a token outside with a row of its own": (
        "vllm-medusa",
        lambda t: {"lm_heads.0.weight": refilled(t["lm_heads.0.weight"], [1], 0.1)},
        "proposes from other tokens|is not the mean",
    ),
    "zeros for tokens outside": (
        "vllm-medusa",
        lambda t: {"lm_heads.0.weight": refilled(t["lm_heads.0.weight"], OTHERS, 0.0)},
        "row 1 of lm_heads.0.weight is not the mean",
    ),
    "a bias lost": ("medusa", lambda t: {"2.0.linear.bias": 0 * t["2.0.linear.bias"]}, "other logits"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_controls(fault: str, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is almost right is caught before anything stands under the folder's name."""
    name, change, message = FAULTS[fault]
    kind = "recurrent" if name in ("eagle3", "speculators") else "medusa"
    heads = heads_on(base, kind, None if name == "medusa" else VOCABULARY)
    right = FORMATS[name]

    def wrong(heads: Heads, base: FrozenBase) -> Content:
        content = right.content(heads, base)
        return replace(content, tensors=content.tensors | change(content.tensors))

    monkeypatch.setitem(FORMATS, name, replace(right, content=wrong))
    with pytest.raises(UserError, match=message):
        export(heads, base, name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another draft vocabulary": ("eagle3", {"draft_vocab_size": 20}, "lm_head.weight is .*expected"),
    "another vocabulary": ("eagle3", {"vocab_size": 40}, "t2d is bool"),
    "no draft vocabulary": ("eagle3", {"draft_vocab_size": None}, "draft_vocab_size is None"),
    "other heads": ("eagle3", {"num_attention_heads": 8}, "q_proj"),
    "unsaid residual": ("eagle3", {"norm_before_residual": None}, "norm_before_residual is None"),
    "other residual": ("eagle3", {"norm_before_residual": True}, "norm_before_residual is True"),
    "two layers": ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    "norms that are not there": ("eagle3", {"fc_norm": True}, "fc_norm.0.weight is missing"),
    "layers in one count": ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "by outputs"),
    "another architecture": ("eagle3", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLMEagle3"),
    "another speculator": ("speculators", {"speculators_model_type": "mtp"}, "speculators_model_type is 'mtp'"),
    "no sizes": ("speculators", {"transformer_layer_config": None}, "lacks transformer_layer_config"),
    "no method": ("speculators", {"speculators_config": {}}, "proposal_methods"),
    "more heads": ("vllm-medusa", {"num_heads": 4}, "blocks.3.layers.0.weight is missing"),
    "fewer heads": ("vllm-medusa", {"num_heads": 2}, "blocks.2.layers.0.bias .* is not of this format"),
    "an output matrix each": ("vllm-medusa", {"original_lm_head": False}, "lm_heads.1.weight is missing"),
    "a truncation": ("vllm-medusa", {"truncated_vocab_size": 22}, "token_map is missing"),
    "a token inside as one outside": ("vllm-medusa", {OUTSIDE: 3}, "row 3 of lm_heads.0.weight is not the mean"),
    "a token beyond": ("vllm-medusa", {OUTSIDE: 64}, "outside_draft_vocabulary is 64; .* from 0 to 63"),
    "more layers": ("medusa", {"medusa_num_layers": 2}, "0.1.linear.weight is missing"),
    "heads as text": ("medusa", {"medusa_num_heads": "3"}, "medusa_num_heads is '3'"),
}


@pytest.mark.parametrize("damage", CONFIGS)
def test_a_config_that_is_almost_right_is_refused(damage: str, base: FrozenBase, tmp_path: Path) -> None:
    name, change, message = CONFIGS[damage]
    kind = "recurrent" if name in ("eagle3", "speculators") else "medusa"
    heads = heads_on(base, kind, None if name == "medusa" else VOCABULARY)
    folder = export(heads, base, name, tmp_path / "out").folder
    document = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(document | change))
    with pytest.raises(UserError, match=message):
        FORMATS[name].read(folder)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (lambda f: f.rename(f.with_name("gone")), "is not a folder"),
    "no config": (lambda f: (f / CONFIG).unlink(), "has no config.json"),
    "config not JSON": (lambda f: (f / CONFIG).write_text("{"), "is not JSON"),
    "config a list": (lambda f: (f / CONFIG).write_text("[]"), "holds list"),
    "no weights": (lambda f: weights(f).unlink(), "has no model.safetensors"),
    "a pickle": (lambda f: weights(f).rename(f / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
    "cut weights": (lambda f: weights(f).write_bytes(weights(f).read_bytes()[:99]), "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(damage: str, base: FrozenBase, tmp_path: Path) -> None:
    harm, message = DAMAGE[damage]
    folder = export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out").folder
    harm(folder)
    with pytest.raises(UserError, match=message):
        FORMATS["eagle3"].read(folder)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "another kind": ("eagle3", "medusa", {}, "these are medusa ones.*vllm-medusa, medusa"),
    "recurrent as medusa": ("vllm-medusa", "recurrent", {}, "these are recurrent ones.*eagle3, speculators"),
    "hydra": ("medusa", "hydra", {}, "these are hydra ones"),
    "two features": ("eagle3", "recurrent", {"feature_layers": (1, 3)}, "fuses 3 feature layers"),
    "the embedding": ("eagle3", "recurrent", {"feature_layers": (0, 1, 2)}, r"read \[0, 1, 2\]"),
    "the last state": ("speculators", "recurrent", {"feature_layers": (1, 2, 4)}, r"read \[1, 2, 4\]"),
    "an earlier state": ("vllm-medusa", "medusa", {"feature_layers": (2,)}, "these read layer 2"),
    "two layers": ("medusa", "medusa", {"num_layers": 2}, "2 different ones.*vllm-medusa"),
    "draft vocabulary": ("medusa", "medusa", {"draft_ids": VOCABULARY}, "has no draft vocabulary.*vllm-medusa"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_format_cannot_say_is_refused(case: str, base: FrozenBase, tmp_path: Path) -> None:
    name, kind, fields, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        export(heads_on(base, kind, **fields), base, name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt_neox", "gpt2"])
def test_other_blocks_than_llamas_are_refused(family: str, tmp_path: Path) -> None:
    base = base_for_formats(tmp_path / "base", family)
    with pytest.raises(UserError, match="has a block of Llama's type, and that of these heads has"):
        export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out")


def test_only_an_export_is_replaced_and_only_if_given_up(base: FrozenBase, tmp_path: Path) -> None:
    """What --overwrite may replace is an earlier export, of any format, or an empty folder; never files of others."""
    heads, folder = heads_on(base, "medusa"), tmp_path / "out"
    folder.mkdir()
    export(heads, base, "custom_generate", folder, overwrite=True)
    with pytest.raises(UserError, match="exists; choose another folder, or replace it with --overwrite"):
        export(heads, base, "medusa", folder)
    export(heads, base, "medusa", folder, overwrite=True)
    for name in ("mine.txt", "deep/er/mine", "link"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(tmp_path) if name == "link" else path.write_text("kept")
        before = sorted(folder.rglob("*"))
        with pytest.raises(UserError, match="holds other things than what export writes"):
            export(heads, base, "medusa", folder, overwrite=True)
        assert sorted(folder.rglob("*")) == before
        path.unlink()
    (folder / RECORD).unlink()
    with pytest.raises(UserError, match="holds other things than what export writes"):
        export(heads, base, "medusa", folder, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_read_is_never_replaced(base: FrozenBase, tmp_path: Path) -> None:
    """The output is not the heads' folder, nor the base's, nor one that holds them, nor one in them."""
    heads = load_heads(save_heads(heads_on(base, "medusa"), tmp_path / "ow" / "medusa"))
    heads.eval().bind(base.embedding, base.output_matrix)
    assert heads.loaded_from is not None
    (tmp_path / "ow" / "precious.txt").write_text("kept")
    (tmp_path / "link").symlink_to(heads.loaded_from)
    before = sorted(tmp_path.rglob("*"))
    for path, option in (
        (heads.loaded_from, "--heads"),
        (heads.loaded_from.parent, "--heads"),
        (heads.loaded_from / "exported", "--heads"),
        (tmp_path / "link", "--heads"),
        (Path(base.name), "--base"),
        (Path(base.name) / "exported", "--base"),
    ):
        with pytest.raises(UserError, match=f"is, holds or lies in {option}"):
            export(heads, base, "medusa", path, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_export_left_is_cleared_up(base: FrozenBase, tmp_path: Path) -> None:
    """A day later, and only what is surely an export's: other hidden folders stay."""
    heads, long_ago = heads_on(base, "medusa"), time.time() - 2 * 86400
    old, new, mine, others = (tmp_path / f".out.{name}" for name in ("abcd_123", "abcd_124", "abcd_125", "notes"))
    for path in (old, new, mine, others):
        (path / "out").mkdir(parents=True)
        (path / "out" / CONFIG).write_text("{}")
    (mine / "out" / "mine").write_text("kept")
    for path in (old, mine, others):
        os.utime(path, (long_ago, long_ago))
    export(heads, base, "medusa", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == [new.name, mine.name, others.name, "out"]


@pytest.mark.parametrize("case", STRICT)
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_heads_with_numbers_that_are_none(case: str, number: float, base: FrozenBase, tmp_path: Path) -> None:
    """In any one tensor, and whether one number of it or all."""
    for whole in (False, True):
        name, heads = made(case, base)
        for place, parameter in heads.named_parameters():
            given = parameter.data.clone()
            parameter.data.view(-1)[: None if whole else 1] = number
            with pytest.raises(UserError, match=rf"hold NaN or infinity \({place}\)"):
                export(heads, base, name, tmp_path / "out")
            parameter.data = given
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", STRICT)
def test_numbers_beyond_float16(case: str, base: FrozenBase, tmp_path: Path) -> None:
    name, heads = made(case, base)
    place, parameter = next(iter(heads.named_parameters()))
    parameter.data.view(-1)[0] = 1e5
    with pytest.raises(UserError, match=f"--dtype is float16, whose largest number is 65504, and {place} hold larger"):
        export(heads, base, name, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == []
    for dtype in ("bfloat16", "float32"):
        export(heads, base, name, tmp_path / dtype, dtype=dtype)


@pytest.mark.parametrize("case", ["eagle3", "speculators", "vllm-medusa", "medusa"])
def test_what_rounding_does_is_told(case: str, base: FrozenBase, tmp_path: Path) -> None:
    """The folder against the rounded heads, and these against the heads as they are: the first difference is of the
    conversion, the second is what the reader of the folder gets; report, card and record say both."""
    name, heads = made(case, base)
    exact = export(heads, base, name, tmp_path / "exact")
    assert exact.rounding == 0.0
    assert "rounding itself" not in exact.told() + (exact.folder / CARD).read_text()
    done = export(heads, base, name, tmp_path / "out", dtype="bfloat16")
    assert done.worst < 1e-4 < 1e-3 < done.rounding < done.scale
    assert "heads rounded to bfloat16" in done.told()
    told = f"the rounding itself changes logits by up to {done.rounding:.1e}"
    assert told in done.told()
    assert told in (done.folder / CARD).read_text()
    record = json.loads((done.folder / RECORD).read_text())
    assert (record["dtype"], record["draft_length"]) == ("bfloat16", heads.config.draft_length)
    assert record["compared"]["largest_change_by_rounding"] == done.rounding
    given = export_module._sample(heads, base)
    features, tokens, drafts = given
    lent = Lent(base.embedding.float(), base.output_matrix.float())
    with torch.no_grad():
        theirs = FORMATS[name].read(done.folder).logits(features[0], tokens[0], drafts, lent)
        ours = export_module._ours(heads, *given)
    can = ours.isfinite()
    assert float((theirs - ours)[can].abs().max()) == pytest.approx(done.rounding, abs=1e-3)


def test_the_base_that_was_given_is_named(base: FrozenBase, tmp_path: Path) -> None:
    """Not the one in the heads, which may be gone."""
    heads = heads_on(base, "medusa")
    heads.config = replace(heads.config, base=replace(heads.config.base, name="/nowhere/base"))
    folder = export(heads, base, "medusa", tmp_path / "out").folder
    assert json.loads((folder / CONFIG).read_text())["base_model_name_or_path"] == base.name


@pytest.mark.parametrize("step", ["write_tensors", "compare"])
def test_a_failure_leaves_what_was_there(
    step: str, base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    folder = export(heads_on(base, "medusa"), base, "medusa", tmp_path / "out").folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(export_module, step, full_disk)
    with pytest.raises(OSError, match="No space"):
        export(heads_on(base, "medusa"), base, "medusa", folder, overwrite=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_unknown_names_are_refused(base: FrozenBase, tmp_path: Path) -> None:
    heads = heads_on(base, "medusa")
    with pytest.raises(UserError, match="--format is 'eagle2'; use one of vllm-medusa, eagle3"):
        export(heads, base, "eagle2", tmp_path / "out")
    with pytest.raises(UserError, match="--dtype is 'int8'; use one of float32"):
        export(heads, base, "medusa", tmp_path / "out", dtype="int8")
