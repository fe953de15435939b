"""The schema of heads: what earlier versions wrote still means the same, and wrong blocks are named."""

import json
from typing import Any

import pytest
import torch

from mtp.config import BlockShape, HeadsConfig
from mtp.errors import UserError
from mtp.heads import RecurrentHeads, build_heads
from tests.mtp.heads_toys import BLOCK, D, K, V, toy_config, toy_heads

EARLIER = """{"kind": "recurrent", "draft_length": 3, "draft_vocab_size": null, "feature_layers": [1, 2, 3],
"num_layers": 1, "hidden_size": 32, "vocab_size": 64, "base": {"name": "toy", "revision": null, "fingerprint": "f",
"tokenizer_fingerprint": "t"}, "draft_vocab_hash": null, "block": {"intermediate_size": 48, "num_attention_heads": 4,
"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0}, "format_version": 1}"""
EARLIER_TENSORS = {
    "fc.weight": (32, 96),
    "embed_norm.weight": (32,),
    "hidden_norm.weight": (32,),
    "attention.q_proj.weight": (32, 64),
    "attention.k_proj.weight": (16, 64),
    "attention.v_proj.weight": (16, 64),
    "attention.o_proj.weight": (32, 32),
    "mlp_norm.weight": (32,),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "norm.weight": (32,),
}


def test_heads_of_an_earlier_version_load_as_they_were() -> None:
    config = HeadsConfig.from_json(json.loads(EARLIER))
    assert config == toy_config("recurrent")
    assert {name: tuple(tensor.shape) for name, tensor in build_heads(config).state_dict().items()} == EARLIER_TENSORS


def test_recurrent_heads_compute_the_formula() -> None:
    """At the first anchor, where attention has one key and so weight one, by hand."""
    heads = toy_heads("recurrent")
    assert isinstance(heads, RecurrentHeads)
    features, tokens = torch.randn(1, 1, 3 * D, dtype=torch.float64), torch.randint(0, V, (1, 1 + K))
    weights = {name: tensor.double() for name, tensor in heads.state_dict().items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[f"{name}.weight"] * x / (x.square().mean() + 1e-5).sqrt()

    g = weights["fc.weight"] @ features[0, 0]
    a = torch.cat([norm(heads.embed(tokens[0, 1]), "embed_norm"), norm(g, "hidden_norm")])
    values = (weights["attention.v_proj.weight"] @ a).view(2, 8).repeat_interleave(2, dim=0).flatten()
    z = g + weights["attention.o_proj.weight"] @ values
    m = norm(z, "mlp_norm")
    inner = torch.nn.functional.silu(weights["mlp.gate_proj.weight"] @ m) * (weights["mlp.up_proj.weight"] @ m)
    expected = norm(z + weights["mlp.down_proj.weight"] @ inner, "norm")
    assert (heads.unroll(features, tokens)[0, 0, 0] - expected).abs().max() < 1e-9


WRONG_BLOCKS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"norm": "batch"}, "block: norm is 'batch'; allowed are rms, layer"),
    ({"activation": "tanh"}, "block: activation is 'tanh'; allowed are silu"),
    ({"num_key_value_heads": 3}, "the second must divide the first"),
    ({"head_dim": 7}, "the third be even"),
    ({"intermediate_size": 0}, "a size below 1"),
    ({"rope_frequencies": [1.0] * 5}, "rope_frequencies has 5 entries"),
    ({"rope_frequencies": 1.0}, "a list is needed"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG_BLOCKS)
def test_wrong_blocks_are_named(changes: dict[str, Any], message: str) -> None:
    document = toy_config("recurrent").to_json()
    document["block"] |= changes
    with pytest.raises(UserError, match=message):
        HeadsConfig.from_json(document)


def test_every_field_of_a_block_survives_json() -> None:
    shape = BlockShape(**(vars(BLOCK) | {"norm": "layer", "gated": False, "rope_frequencies": (1.0, 0.1)}))
    config = toy_config("parallel", block=shape)
    assert HeadsConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
