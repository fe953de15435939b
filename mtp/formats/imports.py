"""From a foreign folder to heads of ours, on the base that they were trained for.

Knows: which of our modules take which tensors, and what can be told from the outside: sizes, feature layers, whose
output rows they are, exchanged halves. Refuses to know: how folders are read (the formats' readers), and the Hub.

Shapes: T position, K draft position, D hidden, V vocabulary, Vd draft vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mtp.base import FrozenBase
from mtp.config import BaseRef, BlockShape, HeadsConfig, HeadsOptions, OwnOutput
from mtp.errors import UserError
from mtp.formats.eagle3 import PLACES
from mtp.formats.eagle3_reader import AUX_LAYERS, Eagle3Reader, read_eagle3, read_speculators
from mtp.formats.export import compare
from mtp.formats.interface import Lent
from mtp.formats.medusa_reader import MedusaReader, read_original, read_vllm
from mtp.heads import Heads, build_heads
from mtp.heads.blocks import frequencies
from mtp.initialise import new_heads
from mtp.suggest import did_you_mean
from mtp.vocab import vocab_hash

_Read = Callable[[Path, str], Eagle3Reader | MedusaReader]
READERS: dict[str, _Read] = {
    "eagle3": read_eagle3,
    "speculators": read_speculators,
    "vllm-medusa": read_vllm,
    "medusa": read_original,
}
"""The formats that can be read from a folder, by name."""
IN_BASE = "in-base"
"""Names the modules of a base's own checkpoint, among formats."""
_WORDS = 48  # tokens that the base writes, on which halves are told apart
_LIKELIER, _MARGIN = 1.5, 0.1


def import_heads(
    folder: Path,
    format_name: str,
    base: FrozenBase,
    *,
    draft_length: int | None = None,
    feature_layers: tuple[int, ...] | None = None,
) -> Heads:
    """The heads in a foreign folder, in float32 on the CPU, bound; their logits are compared with the reader's.

    draft_length: K of EAGLE-3 heads, which they do not say (default 4); Medusa's is their number. feature_layers: those
    of EAGLE-3 heads in our count, the input of layer i, where the folder does not say them beyond doubt. UserError on
    an unknown format, a folder that is not whole, another base, and halves that are evidently exchanged.
    """
    if format_name not in READERS:
        raise UserError(f"--format is {format_name!r}; {did_you_mean(format_name, (*READERS, IN_BASE))}")
    reader = READERS[format_name](folder, "--input")
    if isinstance(reader, MedusaReader):
        for name, value in (("draft-length", draft_length), ("feature-layers", feature_layers)):
            if value is not None:
                raise UserError(f"--{name} is {value}, which medusa heads do not leave open; leave it out.")
        heads = _medusa(reader, base, folder)
    else:
        heads = _recurrent(reader, base, folder, 4 if draft_length is None else draft_length, feature_layers)
    # Where the rows are the base's own, the folder may hold them rounded; so they are for the comparison.
    lent = Lent(base.embedding.cpu().float(), base.output_matrix.cpu().to(reader.dtype).float())
    compare(reader, heads.float().eval().bind(lent.embedding, lent.output_matrix), base, lent)
    heads.bind(lent.embedding, base.output_matrix.cpu().float())
    if isinstance(reader, Eagle3Reader):
        _check_halves(heads, base, folder)
    return heads


def import_from_base(base: FrozenBase, draft_length: int | None = None) -> Heads:
    """Sequential heads made of the modules that the base's own checkpoint ships (see `mtp.shipped`), bound.

    draft_length: how many of them, from the first; None is one, which is what most bases ship. They are what
    `heads.init: shipped` begins training with. UserError where the base ships fewer, or modules of another kind.
    """
    count = 1 if draft_length is None else draft_length
    return new_heads(HeadsOptions(kind="sequential", draft_length=count, init="shipped"), base)


def _medusa(reader: MedusaReader, base: FrozenBase, folder: Path) -> Heads:
    size = reader.heads[0][0][0].shape[0]
    _check_sizes(size, reader.vocab_size, base, folder)
    tensors: dict[str, Tensor] = {}
    for head, layers in enumerate(reader.heads):
        for layer, (weight, bias) in enumerate(layers):
            tensors |= {f"heads.{head}.layers.{layer}.weight": weight, f"heads.{head}.layers.{layer}.bias": bias}
    first, *others = reader.outputs
    same = all(torch.equal(first, other) for other in others)
    config = HeadsConfig(
        kind="medusa",
        draft_length=len(reader.heads),
        num_layers=len(reader.heads[0]),
        feature_layers=(base.num_layers,),
        hidden_size=size,
        vocab_size=reader.vocab_size,
        base=_reference(base),
    )
    return _filled(config, tensors, base, reader.token_map, first if same else torch.stack(reader.outputs))


def _recurrent(
    reader: Eagle3Reader, base: FrozenBase, folder: Path, draft_length: int, layers: tuple[int, ...] | None
) -> Heads:
    llama, weights = reader.llama, reader.weights
    _check_sizes(llama.hidden_size, llama.vocab_size, base, folder)
    if reader.fc_norm != reader.norm_output:
        raise UserError(
            f"{folder}: fc_norm is {reader.fc_norm} and norm_output is {reader.norm_output}; heads have both norms of "
            "EAGLE-3.1 or neither, so these cannot be imported."
        )
    lent = weights.get("embed_tokens.weight")
    if lent is not None and not torch.equal(lent.float(), base.embedding.cpu().to(lent.dtype).float()):
        raise UserError(
            f"{folder}: embed_tokens.weight is not the input embedding of base {base.name!r}, which heads here borrow; "
            "name the base that the heads were trained for with --base."
        )
    tensors = {f"{ours}.weight": weights[f"{place.format(layer='layer')}.weight"] for place, ours in PLACES.items()}
    if reader.fc_norm:
        tensors |= {f"feature_norms.{i}.weight": weights[f"fc_norm.{i}.weight"] for i in range(AUX_LAYERS)}
    config = HeadsConfig(
        kind="recurrent",
        draft_length=draft_length,
        feature_layers=_layers(reader, base, folder, layers),
        eagle31_norms=reader.fc_norm,
        hidden_size=llama.hidden_size,
        vocab_size=llama.vocab_size,
        block=_block(llama),
        base=_reference(base),
    )
    whole = torch.equal(reader.base_ids, torch.arange(llama.vocab_size))
    return _filled(config, tensors, base, None if whole else reader.base_ids, weights["lm_head.weight"])


def _block(llama: Any) -> BlockShape:
    """The layer's shape; frequencies that do not follow the formula one by one."""
    shape = BlockShape(
        intermediate_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        rms_norm_eps=llama.rms_norm_eps,
        rope_theta=float(llama.rope_parameters["rope_theta"]),
    )
    rotary = LlamaRotaryEmbedding(llama)
    if rotary.attention_scaling == 1.0 and torch.allclose(rotary.inv_freq, frequencies(shape), rtol=1e-5, atol=0):
        return shape
    return replace(shape, rope_frequencies=tuple(rotary.inv_freq.tolist()), rope_scale=float(rotary.attention_scaling))


def _layers(reader: Eagle3Reader, base: FrozenBase, folder: Path, asked: tuple[int, ...] | None) -> tuple[int, ...]:
    """Feature layers in our count: as asked, as written, or what engines take where nothing is written."""
    last, doubtful = base.num_layers, reader.doubtful_ids
    layers = asked or reader.layer_ids
    if layers is None and doubtful is not None:
        outputs = " ".join(str(layer + 1) for layer in doubtful)
        raise UserError(
            f"{folder} has eagle_aux_hidden_state_layer_ids {list(doubtful)} inside eagle_config alone, which SGLang "
            f"counts by outputs of layers and vLLM by inputs; say which: --feature-layers {outputs} if the heads were "
            f"made for SGLang (as those of SpecForge are), or --feature-layers {' '.join(map(str, doubtful))}."
        )
    layers = (2, last // 2, last - 3) if layers is None else layers
    if len(layers) != AUX_LAYERS or not all(0 <= layer <= last for layer in layers):
        raise UserError(
            f"--feature-layers is {' '.join(map(str, layers))}; name {AUX_LAYERS} from 0 (embedding) to {last} (after "
            f"the final norm) of base {base.name!r}."
        )
    return tuple(layers)


def _check_sizes(size: int, vocab: int, base: FrozenBase, folder: Path) -> None:
    for name, found, needed in (("hidden_size", size, base.hidden_size), ("vocab_size", vocab, base.vocab_size)):
        if found != needed:
            raise UserError(
                f"{folder}: {name} is {found}, and base {base.name!r} has {needed}; name the base that the heads were "
                "trained for with --base."
            )


def _reference(base: FrozenBase) -> BaseRef:
    return BaseRef(
        name=base.name,
        revision=base.revision,
        fingerprint=base.fingerprint(),
        tokenizer_fingerprint=base.tokenizer_fingerprint() if base.tokenizer is not None else "",
    )


def _filled(
    config: HeadsConfig, tensors: dict[str, Tensor], base: FrozenBase, draft_ids: Tensor | None, rows: Tensor
) -> Heads:
    """Heads with these tensors; output rows [Vd,D] or [K,Vd,D] that are the base's own are left to the base."""
    if draft_ids is not None:
        config = replace(config, draft_vocab_size=len(draft_ids), draft_vocab_hash=vocab_hash(draft_ids))
        tensors = tensors | {"draft_ids": draft_ids}
    theirs = base.output_matrix.cpu() if draft_ids is None else base.output_matrix.cpu()[draft_ids]
    own: OwnOutput = "each" if rows.dim() == 3 else "one"
    if torch.equal(rows.float(), theirs.to(rows.dtype).float()):
        own = "none"
    else:
        tensors = tensors | {"output_rows": rows}
    heads = build_heads(replace(config, own_output=own))
    heads.load_state_dict(tensors)
    return heads


@torch.no_grad()
def _check_halves(heads: Heads, base: FrozenBase, folder: Path) -> None:
    """UserError where q, k and v evidently read [state ; embedding]: on a text that the base writes, the heads then
    overlap with it far better once their halves are exchanged."""
    text = _written(base)
    given, twin = _overlap(heads, base, text), copy.deepcopy(heads)
    state = twin.state_dict()
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = state[f"attention.{name}.weight"]
        weight.copy_(torch.cat(weight.chunk(2, dim=1)[::-1], dim=1))
    exchanged = _overlap(twin, base, text)
    if exchanged > _LIKELIER * given + _MARGIN:
        raise UserError(
            f"{folder}: self_attn.q_proj.weight, k_proj.weight and v_proj.weight read [state ; embedding], and "
            f"[embedding ; state] is expected: first drafts overlap with base {base.name!r} by {given:.2f} as they are "
            f"and by {exchanged:.2f} with their halves exchanged. Exchange the two halves of their columns."
        )


def _written(base: FrozenBase) -> Tensor:
    """Tokens [1,T] that the base writes greedily."""
    start = getattr(base.tokenizer, "bos_token_id", None)
    text = torch.tensor([[0 if start is None else start]], device=base.device)
    for _ in range(min(_WORDS, base.context_length - 1)):
        following = base.logits(base.forward(text).hidden[:, -1:]).argmax(-1)
        text = torch.cat([text, following], dim=1)
    return text


def _overlap(heads: Heads, base: FrozenBase, text: Tensor) -> float:
    """Mean over a text [1,T] of sum_x min(p, q) at the first draft position."""
    output = base.forward(text, feature_layers=heads.config.feature_layers)
    p = base.logits(output.hidden)[0, 1:].softmax(-1).cpu()
    padded = torch.nn.functional.pad(text.cpu(), (0, heads.config.draft_length))
    logits = heads.project(heads.unroll(output.features.float().cpu(), padded))[0, :-1, 0]
    q = logits.softmax(-1)
    chosen = p if heads.draft_ids is None else p[:, heads.draft_ids]
    return float(torch.minimum(chosen, q).sum(-1).mean())
