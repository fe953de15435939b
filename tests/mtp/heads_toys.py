"""Small heads on random features, for tests of the mathematics."""

import torch
from torch import Tensor

from mtp.config import BaseRef, BlockShape, HeadsConfig
from mtp.heads import Heads, build_heads
from mtp.vocab import vocab_hash

V, D, K = 64, 32, 3
BLOCK = BlockShape(intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8)


def toy_config(kind: str, draft_ids: Tensor | None = None, **fields: object) -> HeadsConfig:
    """A config of `kind`, with three feature layers for recurrent heads."""
    given = {
        "kind": kind,
        "draft_length": K,
        "hidden_size": D,
        "vocab_size": V,
        "feature_layers": (4,) if kind == "medusa" else (1, 2, 3),
        "block": None if kind == "medusa" else BLOCK,
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
        for parameter in heads.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        if heads.draft_ids is not None:
            heads.draft_ids.copy_(draft_ids)
        return heads.bind(torch.randn(V, D).double(), torch.randn(V, D).double())
