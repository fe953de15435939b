"""Heads on a tiny base, for tests of foreign formats."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.config import HeadsOptions, OwnOutput
from mtp.heads import Heads, build_heads
from mtp.initialise import new_heads
from tests.tiny import NUM_LAYERS, VOCAB_SIZE, tiny_base

VOCABULARY = torch.arange(0, VOCAB_SIZE, 3)
DEFAULTS: dict[str, dict[str, Any]] = {
    "recurrent": {"feature_layers": (1, 2, 3)},
    "medusa": {"feature_layers": (NUM_LAYERS,)},
}


def base_for_formats(folder: Path, family: str = "llama") -> FrozenBase:
    """The tiny base in float32, under the path of its own folder."""
    return tiny_base(family, folder)


def heads_on(
    base: FrozenBase, kind: str, draft_ids: Tensor | None = None, own_output: OwnOutput = "none", **fields: Any
) -> Heads:
    """Heads of `base` with wide random weights, so that every tensor shows in the logits."""
    given = {"kind": kind, "draft_length": 3, **DEFAULTS.get(kind, {}), **fields}
    if draft_ids is not None:
        given["draft_vocab_size"] = len(draft_ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        heads = new_heads(HeadsOptions(**given), base, draft_ids)
        for name, parameter in heads.named_parameters():
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
        if own_output != "none":
            heads = build_heads(replace(heads.config, own_output=own_output))
            for name, tensor in heads.state_dict().items():
                if tensor.is_floating_point():
                    torch.nn.init.normal_(tensor, mean=1.0 if "norm" in name else 0.0, std=0.3)
            if heads.draft_ids is not None:
                heads.draft_ids.copy_(draft_ids)
    return heads.eval().bind(base.embedding, base.output_matrix)
