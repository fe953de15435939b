"""The base's last block in our terms: what is read, that copies are verified, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.heads.blocks import frequencies
from mtp.last_block import copy_last_block, read_shape
from tests.tiny import tiny_base, tiny_config, tiny_tokenizer


def base_like(family: str, **changes: Any) -> FrozenBase:
    """A tiny base of a family with a changed configuration."""
    fields = tiny_config(family).to_dict() | changes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    return FrozenBase.from_model(model.float(), tiny_tokenizer(), family)


TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "phi3": {},
    "gpt2": {"norm": "layer", "gated": False, "activation": "gelu_tanh", "intermediate_size": 128},
    "gpt_neox": {"norm": "layer", "gated": False, "activation": "gelu", "parallel_residual": True},
}
DEFAULTS = {"norm": "rms", "gated": True, "activation": "silu", "qkv_bias": False, "qk_norm": False}
DEFAULTS |= {"parallel_residual": False, "intermediate_size": 48, "rope_scale": 1.0}


@pytest.mark.parametrize("family", TYPES)
def test_the_type_is_read(family: str, tmp_path: Path) -> None:
    shape = read_shape(tiny_base(family, tmp_path))
    biased = {"qkv_bias": True, "output_bias": True, "mlp_bias": True} if family.startswith("gpt") else {}
    for name, value in (DEFAULTS | TYPES[family] | biased).items():
        assert getattr(shape, name) == value, name
    assert shape.rope_frequencies == ((1.0,) if family == "gpt_neox" else None)  # NeoX rotates a quarter of a head


def test_a_base_without_rotation_is_copied_without_and_else_rotated(tmp_path: Path) -> None:
    base = tiny_base("gpt2", tmp_path)
    assert read_shape(base).rope_frequencies is None
    assert read_shape(base, as_copy=True).rope_frequencies == ()
    with pytest.raises(UserError, match="computes something else"):
        copy_last_block(base, read_shape(base))


def test_rotation_of_each_layer_type() -> None:
    """Gemma-3's last layer is one with full attention, which has a rotation of its own."""
    assert read_shape(base_like("gemma3")).rope_theta == 1e6


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_rotation_is_copied(scaling: str) -> None:
    rope = {"rope_type": scaling, "rope_theta": 10000.0, **SCALINGS[scaling]}
    base = base_like("llama", rope_parameters=rope)
    shape = read_shape(base)
    plain = replace(shape, rope_frequencies=None)
    assert shape.rope_frequencies is not None
    assert not torch.allclose(frequencies(shape), frequencies(plain))
    assert (shape.rope_scale != 1.0) == (scaling == "yarn")
    copy_last_block(base, shape)
    with pytest.raises(UserError, match="computes something else"):
        copy_last_block(base, replace(plain, rope_theta=3.0))


VARIETIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "intermediate_size": 32}),
    ("phi3", {"num_key_value_heads": 1}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("gpt_neox", {"hidden_act": "relu"}),
    ("gpt2", {"n_inner": 40, "activation_function": "relu"}),
]


@pytest.mark.parametrize(("family", "changes"), VARIETIES)
def test_varieties_of_families_are_copied(family: str, changes: dict[str, Any]) -> None:
    base = base_like(family, **changes)
    block = copy_last_block(base, read_shape(base, as_copy=True))
    assert all(bool(parameter.isfinite().all()) for parameter in block.parameters())


def test_half_precision_is_copied() -> None:
    base = base_like("llama")
    base.model.bfloat16()
    block = copy_last_block(base, read_shape(base))
    copied = block.mlp.down_proj.weight
    assert copied.dtype == torch.float32
    assert torch.equal(copied, base.last_block.mlp.down_proj.weight.float())


STRANGERS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "tanh"}, "computes something else"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "computes something else"),
    ("gemma3", {}, "4 norms"),
]


@pytest.mark.parametrize(("family", "changes", "reason"), STRANGERS)
def test_what_a_copy_would_not_compute_is_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    base = base_like(family, **changes)
    with pytest.raises(UserError, match=f"heads.init is 'base'.*{family}.*{reason}.*heads.init: random"):
        copy_last_block(base, read_shape(base, as_copy=True))
