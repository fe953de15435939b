"""EAGLE-3 folders, as vLLM and SGLang load them and in the speculators format, read strictly and run.

Knows: which tensors `config.json` calls for, and what the engines compute with them, out of transformers' own parts of
Llama. Keys and values are never kept: every draft position reads the whole sequence anew. Refuses to know: how the
folders are written (`mtp.formats.eagle3`), and our own heads.

Shapes: T position, N positions with drafts, K draft position, D hidden, V vocabulary, Vd draft vocabulary, H query
heads, J key-value heads, E head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from mtp.errors import UserError
from mtp.formats.interface import Lent
from mtp.formats.medusa_reader import check_ids
from mtp.formats.tensors import (
    CONFIG,
    RECORD,
    WEIGHTS,
    Expected,
    check_tensors,
    read_document,
    read_record,
    read_tensors,
    whole_number,
)

AUX_LAYERS = 3
_IDS = "eagle_aux_hidden_state_layer_ids"
_MOST = 64  # draft positions: beyond what anybody trains


@dataclass(frozen=True)
class Eagle3Reader:
    """A checked folder. `weights` by name, the layer's as `layer.*`; `base_ids` [Vd] of the draft ids."""

    llama: LlamaConfig
    weights: dict[str, Tensor]
    base_ids: Tensor
    fc_norm: bool
    norm_output: bool
    layer_ids: tuple[int, ...] | None
    """Feature layers in our count, the input of layer i; None where the folder does not say it beyond doubt."""
    doubtful_ids: tuple[int, ...] | None
    """What stands inside `eagle_config` alone, where it is counted in two ways."""
    draft_length: int | None = None
    """K that the folder was written for; None where it does not say."""

    @property
    def dtype(self) -> torch.dtype:
        """Of lm_head in the file."""
        return self.weights["lm_head.weight"].dtype

    def logits(self, features: Tensor, tokens: Tensor, drafts: Tensor, lent: Lent) -> Tensor:
        """See `mtp.formats.interface.Reader`."""
        hidden = self._linear("fc", self._fused(features))  # [T,D]
        inputs, rows = tokens, []
        for draft in [*drafts[:, None], None]:
            after = self._layer(lent.embed(inputs).to(hidden.dtype), hidden)[-1:]
            normed = self._norm("norm", after)
            rows.append(self._linear("lm_head", normed[0]))
            if draft is not None:  # the state of the last position goes on, with the token drafted from it
                inputs, hidden = torch.cat([inputs, draft]), torch.cat([hidden, normed if self.norm_output else after])
        found = torch.stack(rows)
        spread = found.new_full((len(rows), self.llama.vocab_size), -torch.inf)
        spread[:, self.base_ids] = found
        return spread

    def _fused(self, features: Tensor) -> Tensor:
        if not self.fc_norm:
            return features
        parts = features.chunk(AUX_LAYERS, dim=-1)
        return torch.cat([self._norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], dim=-1)

    def _layer(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """One layer over a sequence: embeddings and states, each [N,D], to states [N,D]."""
        both = [self._norm("layer.input_layernorm", embedded), self._norm("layer.hidden_norm", hidden)]
        hidden = hidden + self._attention(torch.cat(both, dim=-1))
        normed = self._norm("layer.post_attention_layernorm", hidden)
        gate, up = self._linear("layer.mlp.gate_proj", normed), self._linear("layer.mlp.up_proj", normed)
        return hidden + self._linear("layer.mlp.down_proj", F.silu(gate) * up)

    def _attention(self, inputs: Tensor) -> Tensor:
        """Causal attention over inputs [N,2D]: [N,D]."""
        size = int(self.llama.head_dim)
        queries, keys, values = (
            self._linear(f"layer.self_attn.{name}_proj", inputs).view(1, len(inputs), -1, size).transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = LlamaRotaryEmbedding(self.llama)(inputs, torch.arange(len(inputs))[None])
        queries, keys = apply_rotary_pos_emb(queries, keys, cos, sin)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return self._linear("layer.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1))

    def _linear(self, name: str, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weights[f"{name}.weight"].to(inputs.dtype))

    def _norm(self, name: str, inputs: Tensor) -> Tensor:
        scaled = inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + self.llama.rms_norm_eps)
        return scaled * self.weights[f"{name}.weight"].to(inputs.dtype)


def read_eagle3(folder: Path, option: str = "--input") -> Eagle3Reader:
    """A folder for vLLM or SGLang. UserError on anything not whole, and on what our heads do not compute."""
    document = read_document(folder, option)
    where = str(folder / CONFIG)
    named = document.get("architectures") or ["nothing"]
    if "eagle3" not in str(named[0]).lower():
        raise UserError(f"{where}: architectures is {named}; LlamaForCausalLMEagle3 is read here: name another format.")
    return _read(folder, document, document, "midlayer", _recorded_length(folder))


def read_speculators(folder: Path, option: str = "--input") -> Eagle3Reader:
    """A folder in the speculators format. UserError on anything not whole, and on what our heads do not compute."""
    document = read_document(folder, option)
    where, kind = str(folder / CONFIG), document.get("speculators_model_type")
    if kind != "eagle3":
        raise UserError(f"{where}: speculators_model_type is {kind!r}; only 'eagle3' is read here: name another.")
    layer = document.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise UserError(f"{where} lacks transformer_layer_config, the sizes of the layer; copy the folder again.")
    methods = (document.get("speculators_config") or {}).get("proposal_methods")
    if not methods:
        raise UserError(f"{where} lacks speculators_config.proposal_methods, how many tokens to draft; copy it again.")
    default = document["speculators_config"].get("default_proposal_method")
    method = next((one for one in methods if one.get("proposal_type") == default), methods[0])
    draft_length = _recorded_length(folder)
    if method.get("speculative_tokens") is not None:
        draft_length = whole_number(method, "speculative_tokens", where, most=_MOST)
    return _read(folder, document, layer, "layers.0", draft_length)


def _recorded_length(folder: Path) -> int | None:
    """K of heads that we exported: an EAGLE-3 config has no word for it."""
    record = read_record(folder)
    if record.get("draft_length") is None:
        return None
    return whole_number(record, "draft_length", str(folder / RECORD), most=_MOST)


def _read(
    folder: Path, document: Mapping[str, Any], layer: Mapping[str, Any], prefix: str, draft_length: int | None
) -> Eagle3Reader:
    config, weights = str(folder / CONFIG), str(folder / WEIGHTS)
    llama = _llama(layer, config)
    draft_vocab = whole_number(document, "draft_vocab_size", config, 2)
    flags = _flags(document, config)
    tensors = read_tensors(folder / WEIGHTS)
    check_tensors(tensors, _expected(llama, draft_vocab, prefix, **flags), weights)
    base_ids = tensors["d2t"] + torch.arange(draft_vocab)
    check_ids(base_ids, llama.vocab_size, "d2t (offsets: base id = draft id + d2t)", weights)
    if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero()[:, 0], base_ids.sort().values):
        raise UserError(f"{weights}: t2d and d2t name different draft vocabularies; write or copy the folder again.")
    named = {name.replace(f"{prefix}.", "layer."): tensor for name, tensor in tensors.items()}
    ids, nested = _layer_ids(document, config)
    doubtful = nested if ids is None else None
    return Eagle3Reader(
        llama, named, base_ids, **flags, layer_ids=ids, doubtful_ids=doubtful, draft_length=draft_length
    )


def _llama(layer: Mapping[str, Any], where: str) -> LlamaConfig:
    """The layer's config, whose sizes must all be written: a default would be guessed."""
    sizes = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"]
    for key in [*sizes, "max_position_embeddings"]:
        whole_number(layer, key, where)
    if layer.get("num_hidden_layers") != 1 or layer.get("hidden_act", "silu") != "silu":
        raise UserError(
            f"{where}: num_hidden_layers is {layer.get('num_hidden_layers')!r} and hidden_act is "
            f"{layer.get('hidden_act', 'silu')!r}; one layer with silu is read here."
        )
    if not isinstance(layer.get("rms_norm_eps"), float):
        raise UserError(f"{where}: rms_norm_eps is {layer.get('rms_norm_eps')!r}; a small number is needed.")
    kept = ("head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
    try:
        return LlamaConfig(**{key: layer[key] for key in (*sizes, *kept) if layer.get(key) is not None})
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{where} is no config of a Llama layer ({error}); correct it.") from None


def _flags(document: Mapping[str, Any], where: str) -> dict[str, bool]:
    """`fc_norm` and `norm_output`; UserError on the variants whose block is another."""
    if document.get("norm_before_residual") is not False:
        raise UserError(
            f"{where}: norm_before_residual is {document.get('norm_before_residual')!r}; only false is read here, and "
            "it must be written, as the defaults of its readers disagree."
        )
    for key in ("norm_before_fc", "attention_bias", "tie_word_embeddings"):
        if document.get(key):
            raise UserError(f"{where}: {key} is {document[key]!r}; heads with it cannot be read here.")
    return {key: bool(document.get(key, False)) for key in ("fc_norm", "norm_output")}


def _layer_ids(document: Mapping[str, Any], where: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Feature layers at the top level, as vLLM counts them, and inside `eagle_config`; None where they are not written.

    Where both are written they must be the same layers, as each reader counts.
    """
    ids, nested = document.get(_IDS), (document.get("eagle_config") or {}).get(_IDS)
    for found in (ids, nested):
        if found is not None and not (isinstance(found, list) and all(isinstance(one, int) for one in found)):
            raise UserError(f"{where}: {_IDS} is {found!r}; a list of whole numbers is needed: correct the file.")
    if ids is not None and (len(ids) != AUX_LAYERS or nested not in (None, [layer - 1 for layer in ids])):
        raise UserError(
            f"{where}: {_IDS} is {ids} and {nested} in eagle_config; {AUX_LAYERS} layers are needed, the first counted "
            "by inputs (vLLM) and the second, one less, by outputs (SGLang): write the folder again."
        )
    return None if ids is None else tuple(ids), None if nested is None else tuple(nested)


def _expected(
    llama: LlamaConfig, draft_vocab: int, layer: str, fc_norm: bool, norm_output: bool
) -> dict[str, Expected]:
    del norm_output  # has no tensor of its own
    size, inner, vocab = llama.hidden_size, llama.intermediate_size, llama.vocab_size
    width, kv_width = llama.num_attention_heads * llama.head_dim, llama.num_key_value_heads * llama.head_dim
    reading = "reads [norm(embedding) ; norm(state)], 2 hidden_size wide"
    shapes = {
        "fc": ((size, AUX_LAYERS * size), "fuses the feature layers"),
        f"{layer}.self_attn.q_proj": ((width, 2 * size), reading),
        f"{layer}.self_attn.k_proj": ((kv_width, 2 * size), reading),
        f"{layer}.self_attn.v_proj": ((kv_width, 2 * size), reading),
        f"{layer}.self_attn.o_proj": ((size, width), "attention's output"),
        f"{layer}.mlp.gate_proj": ((inner, size), "of the MLP"),
        f"{layer}.mlp.up_proj": ((inner, size), "of the MLP"),
        f"{layer}.mlp.down_proj": ((size, inner), "of the MLP"),
        f"{layer}.input_layernorm": ((size,), "norm of the embedding"),
        f"{layer}.hidden_norm": ((size,), "norm of the state"),
        f"{layer}.post_attention_layernorm": ((size,), "norm before the MLP"),
        "norm": ((size,), "norm before lm_head"),
        "lm_head": ((draft_vocab, size), "output rows of the draft vocabulary"),
        **{f"fc_norm.{i}": ((size,), "norm of a feature layer") for i in range(AUX_LAYERS * fc_norm)},
    }
    expected = {f"{name}.weight": Expected(shape, purpose) for name, (shape, purpose) in shapes.items()}
    offsets = "draft id + d2t = base id; without it draft ids would be taken for base ids"
    expected["d2t"] = Expected((draft_vocab,), offsets, torch.int64)
    expected["t2d"] = Expected((vocab,), "which base ids have a draft id", torch.bool, required=False)
    expected["embed_tokens.weight"] = Expected((vocab, size), "the base's own embedding", required=False)
    return expected
