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
from mtp.formats import arrangement
from mtp.formats.arrangement import EXCHANGES, check_arrangement
from mtp.formats.export import export
from mtp.formats.imports import READERS, import_heads
from mtp.formats.tensors import CONFIG, RECORD
from mtp.heads import Heads, build_heads
from mtp.hub import find_heads, load_heads, save_heads
from tests.mtp.format_toys import VOCABULARY, base_for_formats, heads_on
from tests.mtp.test_formats import CASES, halves, made, weights
from tests.mtp.test_shipped import with_modules
from tests.tiny import tiny_base

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
    assert found.config.draft_length == 3


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


@pytest.fixture(scope="module")
def drafting(smollm2: FrozenBase) -> Heads:
    """Heads that draft well."""
    return load_heads(find_heads("smollm2-135m")).eval().bind(smollm2.embedding, smollm2.output_matrix)


def test_what_was_exchanged_is_noticed_at_import(drafting: Heads, smollm2: FrozenBase, tmp_path: Path) -> None:
    """Heads that draft well tell which half of their input is which; the same heads as they are come through, and what
    they draft is told."""
    folder, told = export(drafting, smollm2, "eagle3", tmp_path / "out").folder, []
    found = import_heads(folder, "eagle3", smollm2, on_note=told.append)
    for name in ("draft_length", "feature_layers", "draft_vocab_hash", "base"):
        assert getattr(found.config, name) == getattr(drafting.config, name), name
    (note,) = told
    assert float(note.split(" by ")[1][:4]) > 0.3, note
    tensors = load_file(weights(folder))
    tensors["midlayer.self_attn.q_proj.weight"] = halves(tensors["midlayer.self_attn.q_proj.weight"])
    save_file(tensors, weights(folder))
    with pytest.raises(UserError, match=r"q_proj.weight reads \[state ; embedding\], and \[embedding ; state\]"):
        import_heads(folder, "eagle3", smollm2)


@pytest.mark.slow
def test_each_exchange_is_noticed_alone(drafting: Heads, smollm2: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange, made in heads that draft well, is refused with its name; as they are they are not."""
    text = arrangement._written(smollm2)
    monkeypatch.setattr(arrangement, "_written", lambda base: text)
    assert "first drafts overlap" in check_arrangement(drafting, smollm2, "here")
    right = {name: tensor.clone() for name, tensor in drafting.state_dict().items()}
    for exchange in EXCHANGES.values():
        state = right | exchange(right)
        mended = {name: put for name, put in EXCHANGES.items() if same(state | put(state), right)}
        assert len(mended) == 1
        monkeypatch.setattr(arrangement, "EXCHANGES", mended)  # the others are for the heads as they are, above
        wrong = build_heads(drafting.config).eval()
        wrong.load_state_dict(state)
        with pytest.raises(UserError, match="once that is exchanged") as told:
            check_arrangement(wrong.bind(smollm2.embedding, smollm2.output_matrix), smollm2, "here")
        assert next(iter(mended)) in str(told.value)


def same(state: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    "fields", [{}, {"eagle31_norms": True}, {"draft_ids": VOCABULARY, "own_output": "one"}], ids=str
)
def test_heads_that_draft_nothing_are_not_refused(fields: dict[str, Any], base: FrozenBase) -> None:
    """No exchange makes heads better that fit nothing: random ones are of any arrangement."""
    assert "first drafts overlap" in check_arrangement(heads_on(base, "recurrent", **fields), base, "here")


@pytest.mark.parametrize(
    ("name", "kind"), [("eagle3", "recurrent"), ("speculators", "recurrent"), ("medusa", "medusa")]
)
def test_what_was_exported_for_another_base_is_refused(
    name: str, kind: str, base: FrozenBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base of the same sizes, told by the fingerprint in export.json, unless that is allowed; heads of others leave
    no record, and are taken."""
    folder = export(heads_on(base, kind), base, name, tmp_path / "out").folder
    other = tiny_base("llama", tmp_path, 1)
    args = ["import", "--input", folder, "--format", name, "--base", other.name, "--output", tmp_path / "heads"]
    given = [str(arg) for arg in args]
    assert main(given) == 2
    told = capsys.readouterr().err
    assert (
        f"exported for a base with other weights than --base {other.name}; use the base it names ({base.name}" in told
    )
    assert "--allow-other-base imports all the same" in told
    assert not (tmp_path / "heads").exists()
    assert main([*given, "--allow-other-base"]) == 0
    assert "fewer drafts are accepted" in capsys.readouterr().err
    assert load_heads(tmp_path / "heads").config.base.fingerprint == other.fingerprint()
    (folder / RECORD).unlink()
    assert main([*given, "--overwrite"]) == 0
    assert "fewer drafts" not in capsys.readouterr().err


def test_another_tokenizer_is_refused(base: FrozenBase, tmp_path: Path) -> None:
    folder = export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out").folder
    record = json.loads((folder / RECORD).read_text())
    record["base"]["tokenizer_fingerprint"] = "another"
    (folder / RECORD).write_text(json.dumps(record))
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        import_heads(folder, "eagle3", base)
    record["base"] = "text"
    (folder / RECORD).write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"export.json is not what export writes"):
        import_heads(folder, "eagle3", base)


@pytest.mark.parametrize("name", ["eagle3", "speculators"])
def test_the_draft_length_comes_along(name: str, base: FrozenBase, tmp_path: Path) -> None:
    """K is what the folder says, in the speculators' own words or in export.json, or what is asked, or 4."""
    heads = heads_on(base, "recurrent")
    folder = export(heads, base, name, tmp_path / "out").folder
    assert import_heads(folder, name, base).config.draft_length == heads.config.draft_length == 3
    assert import_heads(folder, name, base, draft_length=2).config.draft_length == 2
    (folder / RECORD).unlink()
    assert import_heads(folder, name, base).config.draft_length == (4 if name == "eagle3" else 3)
    if name == "speculators":
        document = json.loads((folder / CONFIG).read_text())
        method = document["speculators_config"]["proposal_methods"][0]
        method["speculative_tokens"] = 7
        (folder / CONFIG).write_text(json.dumps(document))
        assert import_heads(folder, name, base).config.draft_length == 7
        method["speculative_tokens"] = "many"
        (folder / CONFIG).write_text(json.dumps(document))
        with pytest.raises(UserError, match="speculative_tokens is 'many'; a whole number from 1 to 64"):
            import_heads(folder, name, base)


def test_layers_that_the_folder_names(base: FrozenBase, tmp_path: Path) -> None:
    """Bad ones are the folder's fault; others that are asked for are taken, and said to be others."""
    folder, told = export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "out").folder, []
    assert import_heads(
        folder, "eagle3", base, feature_layers=(0, 1, 4), on_note=told.append
    ).config.feature_layers == (0, 1, 4)
    assert "--feature-layers is 0 1 4, and" in told[0]
    assert "says 1 2 3" in told[0]
    edit_config(folder, eagle_aux_hidden_state_layer_ids=[1, 9, 12], eagle_config=None)
    with pytest.raises(
        UserError, match=r"out: eagle_aux_hidden_state_layer_ids is 1 9 12; give --feature-layers with 3"
    ):
        import_heads(folder, "eagle3", base)


@pytest.mark.parametrize("case", ["eagle3", "speculators", "vllm-medusa", "medusa"])
def test_numbers_that_are_none_are_refused(case: str, base: FrozenBase, tmp_path: Path) -> None:
    """One NaN anywhere in the tensors of a folder is refused, whether or not a logit shows it."""
    name, heads = made(case, base)
    folder = export(heads, base, name, tmp_path / "out").folder
    whole = load_file(weights(folder))
    for place, tensor in whole.items():
        if tensor.is_floating_point():
            broken = tensor.clone()
            broken.view(-1)[-1] = torch.nan
            save_file(whole | {place: broken}, weights(folder))
            with pytest.raises(UserError, match="NaN"):
                import_heads(folder, name, base)


def test_only_an_import_is_replaced(base: FrozenBase, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = export(heads_on(base, "recurrent"), base, "eagle3", tmp_path / "source").folder
    args = [str(arg) for arg in ("import", "--input", source, "--format", "eagle3", "--base", base.name, "--overwrite")]
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious.txt").write_text("kept")
    for output, message in (
        (full, "holds other things than what import writes"),
        (source, "lies in --input"),
        (tmp_path, "lies in --input"),
        (source / "heads", "lies in --input"),
        (Path(base.name) / "heads", "lies in --base"),
    ):
        before = sorted(tmp_path.rglob("*"))
        assert main([*args, "--output", str(output)]) == 2
        assert message in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before
    saved = save_heads(heads_on(base, "medusa"), tmp_path / "heads")
    assert main([*args, "--output", str(saved)]) == 0
    assert load_heads(saved).config.kind == "recurrent"


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
