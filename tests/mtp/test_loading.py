"""What FrozenBase.from_pretrained refuses, and what it says: the message names the base, the reason and the remedy.

Nothing here reaches the network.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from mtp.base import FrozenBase
from mtp.errors import UserError
from tests.tiny import save_tiny, tiny_base, tiny_config, tiny_model, tiny_tokenizer


def load(name: str, **arguments: Any) -> FrozenBase:
    return FrozenBase.from_pretrained(name, device="cpu", **arguments)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is loaded here must not reach the Hub; a Hub id then fails as on a machine without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "a/b/c", "gone.gguf", "two words", ""])
def test_missing_path(name: str) -> None:
    with pytest.raises(UserError, match="does not exist on this machine.*embedded base"):
        load(name)


def test_hub_id_without_network_says_what_was_tried_and_what_to_do() -> None:
    with pytest.raises(UserError) as failure:
        load("nobody/smollm2-135", revision="abc123")
    message = str(failure.value)
    for part in ("'abc123'", "no embedded base", "local folder", "Hub", "Did you mean 'smollm2-135m'", "give its path"):
        assert part in message
    assert "\n" not in message


@pytest.mark.parametrize("error", [type("ConnectError", (Exception,), {})("no route"), TimeoutError("10 s")])
def test_unreachable_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    calls: list[str] = []

    def unreachable(_: Any, name: str, **__: Any) -> None:
        calls.append(name)
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    with pytest.raises(UserError, match="the Hub itself cannot be reached.*Without a network"):
        load("nobody/nothing")
    assert calls == ["nobody/nothing"]


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no config.json"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"kind": "recurrent"}')
    with pytest.raises(UserError, match="could not be loaded"):
        load(str(tmp_path))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_truncated_file(tmp_path: Path, file: str, keep: float) -> None:
    path = save_tiny("llama", tmp_path) / file
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(UserError, match=r"could not be loaded \(.*copy the folder again"):
        load(str(tmp_path))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_missing_file(tmp_path: Path, file: str) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / file).unlink()
    with pytest.raises(UserError, match="could not be loaded"):
        load(str(folder))


def test_missing_weight_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    weights = model.state_dict()
    del weights["model.layers.2.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 of its weights \(model.layers.2.mlp.up_proj.weight\)"):
        load(str(tmp_path))


def test_weights_of_another_shape(tmp_path: Path) -> None:
    config = tiny_config("llama")
    save_tiny("llama", tmp_path)
    config.intermediate_size = 80
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="could not be loaded"):
        load(str(tmp_path))


def test_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(20)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="tokenizer has 75 tokens and its vocabulary only 64"):
        load(str(folder))


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "t5",
            {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 64},
            "encoder-decoder model .t5",
        ),
        ("distilbert", {"dim": 16, "hidden_dim": 16, "n_layers": 1, "n_heads": 2, "vocab_size": 64}, "not a causal"),
        ("bert", SMALL | {"initializer_range": 0.5}, "is not causal: its state at a position depends on later tokens"),
    ],
)
def test_model_that_does_not_predict_the_next_token(
    tmp_path: Path, kind: str, fields: dict[str, Any], message: str
) -> None:
    config = AutoConfig.for_model(kind, **fields)
    model_class = AutoModelForCausalLM if kind == "bert" else AutoModel
    model_class.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        load(str(tmp_path))


def test_remote_code_is_never_run_unasked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Model"}}'
    )
    (tmp_path / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match="trust_remote_code=True"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGUF" + bytes(64), b"not a model at all", b"GGUF\x03" + bytes(range(200))]
)
def test_corrupt_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.gguf (is not a GGUF file|could not be read)"):
        load(str(path))


def test_other_file_revision_dtype_and_device(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a file but not a \.gguf one"):
        load(str(tmp_path / "weights.bin"))
    with pytest.raises(UserError, match="revision 'main' has no meaning"):
        load(str(tmp_path), revision="main")
    with pytest.raises(UserError, match="--dtype is 'int8'; use one of auto, float32"):
        load("smollm2-135m", dtype="int8")
    with pytest.raises(UserError, match="device 'tpu9' cannot be used"):
        FrozenBase.from_pretrained("smollm2-135m", device="tpu9")


def test_weights_that_are_not_finite() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = float("inf")
    with pytest.raises(UserError, match="logits that are not finite"):
        FrozenBase.from_model(model, None, "broken")


def test_loading_is_silent_and_gives_settings_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    tiny_base("gpt_neox", tmp_path)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert transformers_logging.get_verbosity() == level
    assert transformers_logging.is_progress_bar_enabled()
