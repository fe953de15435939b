"""Foreign folders as heads of ours: what was exported comes back bit by bit, what does not fit is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.cli import main
from decode.decoder import Decoder
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.formats.export import export
from mtp.formats.imports import READERS, import_heads
from mtp.formats.tensors import CONFIG
from mtp.hub import find_heads, load_heads, save_heads
from tests.mtp.format_toys import VOCABULARY, base_for_formats, heads_on
from tests.mtp.test_formats import CASES, made, weights
from tests.mtp.test_shipped import with_modules

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return base_for_formats(tmp_path_factory.mktemp("imports"))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    document = json.loads((folder / CONFIG).read_text()) | changes
    kept = {key: value for key, value in document.items() if value is not None}
    (folder / CONFIG).write_text(json.dumps(kept))


def edit_tensors(folder: Path, **changes: Tensor) -> None:
    path = weights(folder)
    save_file(load_file(path) | {name.replace("__", "."): tensor for name, tensor in changes.items()}, path)


@pytest.mark.parametrize("case", CASES)
def test_what_was_exported_comes_back(case: str, base: FrozenBase, tmp_path: Path) -> None:
    name, heads = made(case, base)
    folder = export(heads, base, name, tmp_path / "out").folder
    k = {} if heads.config.kind == "medusa" else {"draft_length": 3}
    found = import_heads(folder, name, base, **k)  # type: ignore[arg-type]
    saved = load_heads(save_heads(found, tmp_path / "heads"))
    assert saved.config == heads.config
    for place, tensor in heads.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[place]), place
    saved.bind(base.embedding, base.output_matrix)
    asked = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    ours = Decoder(base, heads.bind(base.embedding, base.output_matrix)).generate([5, 9, 13], **asked)
    assert Decoder(base, saved).generate([5, 9, 13], **asked).token_ids == ours.token_ids


def test_rotary_scaling_comes_along(tmp_path: Path) -> None:
    """A base of Llama 3's type: the folder says its frequencies, and importing finds the same ones."""
    source = base_for_formats(tmp_path / "base")
    edit_config(Path(source.name), rope_parameters={"rope_theta": 5e5, **LLAMA3})
    base = FrozenBase.from_pretrained(source.name, dtype="float32", device="cpu")
    heads = heads_on(base, "recurrent", VOCABULARY)
    assert heads.config.block is not None
    assert heads.config.block.rope_frequencies is not None
    folder = export(heads, base, "eagle3", tmp_path / "out").folder
    document = json.loads((folder / CONFIG).read_text())
    assert (document["rope_theta"], document["rope_scaling"]["rope_type"]) == (5e5, "llama3")
    found = import_heads(folder, "eagle3", base, draft_length=3)
    assert found.config.block is not None
    assert found.config.block.rope_frequencies == pytest.approx(heads.config.block.rope_frequencies, rel=1e-5)
    edit_config(folder, rope_scaling=None)  # without it the folder has other frequencies, and says so by itself
    other = import_heads(folder, "eagle3", base, draft_length=3)
    assert other.config.block is not None
    assert other.config.block.rope_frequencies is None


@pytest.mark.parametrize("case", ["vllm-medusa", "medusa, an output each", "eagle3, EAGLE-3.1", "speculators"])
def test_numbers_in_16_bits(case: str, base: FrozenBase, tmp_path: Path) -> None:
    """Rounded output rows are still known as the base's; the rest comes back as it was rounded."""
    name, heads = made(case, base)
    folder = export(heads, base, name, tmp_path / "out", dtype="bfloat16").folder
    found = import_heads(folder, name, base)
    assert found.config.own_output == heads.config.own_output
    for place, tensor in heads.state_dict().items():
        rounded = tensor.bfloat16().float() if tensor.is_floating_point() else tensor
        assert torch.equal(rounded, found.state_dict()[place]), place


def test_output_rows_of_their_own(base: FrozenBase, tmp_path: Path) -> None:
    folder = export(heads_on(base, "recurrent", VOCABULARY), base, "eagle3", tmp_path / "out").folder
    rows = torch.randn(len(VOCABULARY), base.hidden_size)
    edit_tensors(folder, lm_head__weight=rows)
    found = import_heads(folder, "eagle3", base)
    assert found.config.own_output == "one"
    assert torch.equal(found.proposal_rows, rows)
    assert found.config.draft_length == 4


def test_feature_layers_that_are_counted_in_two_ways(base: FrozenBase, tmp_path: Path) -> None:
    folder = export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out").folder
    edit_config(folder, eagle_aux_hidden_state_layer_ids=None)
    with pytest.raises(UserError, match=r"say which: --feature-layers 1 2 3 if .* or --feature-layers 0 1 2"):
        import_heads(folder, "eagle3", base)
    assert import_heads(folder, "eagle3", base, feature_layers=(1, 2, 3)).config.feature_layers == (1, 2, 3)
    with pytest.raises(UserError, match="--feature-layers is 1 9 12; name 3 from 0"):
        import_heads(folder, "eagle3", base, feature_layers=(1, 9, 12))
    edit_config(folder, eagle_config=None)
    assert import_heads(folder, "eagle3", base).config.feature_layers == (2, 2, 1)  # L = 4: what engines take


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "half of EAGLE-3.1": ({"norm_output": True}, {}, "fc_norm is False and norm_output is True"),
    "another embedding": ({}, {"embed_tokens__weight": torch.ones(64, 32)}, "is not the input embedding of base"),
    "offsets to nowhere": ({}, {"d2t": torch.full((64,), 3)}, "d2t .* leads to id 64"),
    "one id twice": ({}, {"d2t": -torch.arange(64)}, "leads to the same base id twice"),
    "layers as text": ({"eagle_aux_hidden_state_layer_ids": "1,2,3"}, {}, "a list of whole numbers is needed"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_folders_that_do_not_fit_are_refused(change: str, base: FrozenBase, tmp_path: Path) -> None:
    config, tensors, message = CHANGED[change]
    folder = export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out").folder
    edit_config(folder, **config)
    edit_tensors(folder, **tensors)
    with pytest.raises(UserError, match=message):
        import_heads(folder, "eagle3", base)


def test_another_base_is_refused(base: FrozenBase, smollm2: FrozenBase, tmp_path: Path) -> None:
    for name, kind in (("eagle3", "recurrent"), ("vllm-medusa", "medusa"), ("medusa", "medusa")):
        folder = export(heads_on(base, kind), base, name, tmp_path / name).folder
        with pytest.raises(UserError, match="hidden_size is 32, and base 'smollm2-135m' has 576"):
            import_heads(folder, name, smollm2)


def test_exchanged_halves_are_noticed(smollm2: FrozenBase, tmp_path: Path) -> None:
    """Heads that draft well tell which half of their input is which."""
    heads = load_heads(find_heads("smollm2-135m")).bind(smollm2.embedding, smollm2.output_matrix)
    folder = export(heads, smollm2, "eagle3", tmp_path / "out").folder
    assert import_heads(folder, "eagle3", smollm2).config.own_output == "none"
    tensors = load_file(weights(folder))
    for name in ("q_proj", "k_proj", "v_proj"):
        tensor = tensors[f"midlayer.self_attn.{name}.weight"]
        tensors[f"midlayer.self_attn.{name}.weight"] = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
    save_file(tensors, weights(folder))
    with pytest.raises(UserError, match=r"\[embedding ; state\] is expected"):
        import_heads(folder, "eagle3", smollm2)


def test_options_that_do_not_apply(base: FrozenBase, tmp_path: Path) -> None:
    folder = export(heads_on(base, "medusa"), base, "medusa", tmp_path / "out").folder
    with pytest.raises(UserError, match="--draft-length is 2, which medusa heads do not leave open"):
        import_heads(folder, "medusa", base, draft_length=2)
    with pytest.raises(UserError, match="--format is 'custom_generate'; use one of eagle3, speculators"):
        import_heads(folder, "custom_generate", base)
    assert "custom_generate" not in READERS


def test_the_command(base: FrozenBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = export(heads_on(base, "recurrent", VOCABULARY), base, "speculators", tmp_path / "source").folder
    args = ["import", "--input", source, "--format", "speculators", "--base", base.name, "--output", tmp_path / "heads"]
    given = [str(arg) for arg in args]
    assert main([*given, "--draft-length", "2"]) == 0
    assert "recurrent heads, K = 2" in capsys.readouterr().err
    assert main(["generate", "--heads", str(tmp_path / "heads"), "--prompt", "the user", "--max-new-tokens", "4"]) == 0
    capsys.readouterr()
    assert main(given) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*given, "--overwrite", "--feature-layers", "1", "2", "3"]) == 0
    for missing in ("--input", "--format", "--base", "--output"):
        place = given.index(missing)
        assert main([*given[:place], *given[place + 2 :]]) == 2
        assert f"{missing} is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": -1.0},
        {"rms_norm_eps": "small"},
        {"rope_theta": "abc", "rope_parameters": None},
        {"rope_scaling": {"rope_type": "zzz"}},
        {"architectures": 5},
        {"eagle_config": 5},
        {"num_attention_heads": 10**9},
    ],
    ids=str,
)
def test_nonsense_in_a_config_is_bad_input(
    change: dict[str, object], base: FrozenBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = export(heads_on(base, "recurrent", VOCABULARY), base, "eagle3", tmp_path / "source").folder
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**document, **change}))
    args = ["import", "--input", source, "--format", "eagle3", "--base", base.name, "--output", tmp_path / "heads"]
    assert main([str(arg) for arg in args]) in (0, 2)  # never a traceback
    told = capsys.readouterr().err
    assert not (tmp_path / "heads").exists() or "written" in told


def test_a_billion_heads_are_refused_at_once(base: FrozenBase, tmp_path: Path) -> None:
    source = export(heads_on(base, "medusa"), base, "medusa", tmp_path / "source").folder
    document = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**document, "medusa_num_heads": 10**9}))
    with pytest.raises(UserError, match="medusa_num_heads is 1000000000; a whole number from 1 to 64"):
        import_heads(source, "medusa", base)


def test_modules_in_the_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, source = with_modules(tmp_path, 2)
    args = ["import", "--format", "in-base", "--base", base.name, "--output", str(tmp_path / "heads")]
    assert main([*args, "--draft-length", "2"]) == 0
    found = load_heads(tmp_path / "heads")
    for place, tensor in source.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[place]), place
    assert found.config.feature_layers == (base.num_layers,)
    capsys.readouterr()
    assert main([*args, "--overwrite", "--draft-length", "3"]) == 2
    assert "ships 2 modules" in capsys.readouterr().err
    assert main([*args, "--overwrite", "--input", str(tmp_path)]) == 2
    assert "leave out --input" in capsys.readouterr().err
    assert load_heads(tmp_path / "heads").config.draft_length == 2
