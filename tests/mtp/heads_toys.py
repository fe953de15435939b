"""Small heads on random features, for tests of the mathematics."""

from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from mtp.config import WITH_BLOCK, BaseRef, BlockShape, HeadsConfig, Kind
from mtp.heads import Heads, build_heads
from mtp.vocab import vocab_hash

V, D, K = 64, 32, 3
BLOCK = BlockShape(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
QWEN3 = replace(BLOCK, qk_norm=True, qkv_bias=True, rope_frequencies=(1.0, 0.3, 0.02), rope_scale=1.1)
NEOX = replace(
    BLOCK,
    num_key_value_heads=4,
    norm="layer",
    gated=False,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    parallel_residual=True,
    rope_frequencies=(1.0,),
)
GPT2 = replace(NEOX, activation="gelu_tanh", parallel_residual=False, rope_frequencies=())
KINDS: tuple[str, ...] = get_args(Kind)
VARIANTS: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in KINDS} | {
    "hydra of two layers": {"kind": "hydra", "num_layers": 2},
    "medusa, an output each": {"kind": "medusa", "own_output": "each"},
    "recurrent, own output": {"kind": "recurrent", "own_output": "one"},
    "recurrent, EAGLE-3.1": {"kind": "recurrent", "eagle31_norms": True},
    "recurrent, Qwen3": {"kind": "recurrent", "block": QWEN3},
    "recurrent, GPT-NeoX, EAGLE-3.1": {"kind": "recurrent", "block": NEOX, "eagle31_norms": True},
    "sequential, MiMo": {"kind": "sequential", "block": QWEN3, "concat_order": "hidden_embed"},
    "sequential, GPT-2": {"kind": "sequential", "block": GPT2},
    "parallel, Qwen3": {"kind": "parallel", "block": QWEN3},
    "parallel, GPT-NeoX": {"kind": "parallel", "block": NEOX},
}


def toy_config(kind: str, draft_ids: Tensor | None = None, **fields: object) -> HeadsConfig:
    """A config of `kind`, with three feature layers for recurrent heads."""
    given = {
        "kind": kind,
        "draft_length": K,
        "hidden_size": D,
        "vocab_size": V,
        "feature_layers": (1, 2, 3) if kind == "recurrent" else (4,),
        "block": BLOCK if kind in WITH_BLOCK else None,
        "base": BaseRef(name="toy", fingerprint="f", tokenizer_fingerprint="t"),
        "draft_vocab_size": None if draft_ids is None else len(draft_ids),
        "draft_vocab_hash": None if draft_ids is None else vocab_hash(draft_ids),
    }
    return HeadsConfig(**(given | fields))  # type: ignore[arg-type]


def toy_heads(kind: str, draft_ids: Tensor | None = None, seed: int = 0, **fields: object) -> Heads:
    """Heads with wide random weights, in float64, bound to random matrices."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        heads = build_heads(toy_config(kind, draft_ids, **fields)).double()
        for tensor in heads.state_dict().values():
            if tensor.is_floating_point():
                torch.nn.init.normal_(tensor, std=0.3)
        if heads.draft_ids is not None:
            heads.draft_ids.copy_(draft_ids)
        return heads.bind(torch.randn(V, D).double(), torch.randn(V, D).double())
