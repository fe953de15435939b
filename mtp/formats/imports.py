"""From a foreign folder to heads of ours, on the base that they were trained for.

Knows: which of our modules take which tensors, and what can be told from the outside: sizes, feature layers, whose
output rows they are, and of which base. Refuses to know: how folders are read (the formats' readers), how it is noticed
that something was exchanged (`mtp.formats.arrangement`), and the Hub.

Shapes: T position, K draft position, D hidden, V vocabulary, Vd draft vocabulary.
"""

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
from mtp.formats.arrangement import check_arrangement
from mtp.formats.eagle3 import PLACES
from mtp.formats.eagle3_reader import AUX_LAYERS, Eagle3Reader, read_eagle3, read_speculators
from mtp.formats.export import compare, named, not_finite
from mtp.formats.interface import Lent
from mtp.formats.medusa_reader import MedusaReader, read_original, read_vllm
from mtp.formats.place import is_written
from mtp.formats.tensors import read_record
from mtp.heads import Heads, build_heads
from mtp.heads.blocks import frequencies
from mtp.initialise import new_heads
from mtp.other_base import OTHER_BASE, difference
from mtp.share import CARD, CONFIG, DIGEST, WEIGHTS
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
_USUAL_LENGTH = 4
IN_BASE = "in-base"
"""Names the modules of a base's own checkpoint, among formats."""


def _silent(note: str) -> None:
    del note


def import_heads(
    folder: Path,
    format_name: str,
    base: FrozenBase,
    *,
    draft_length: int | None = None,
    feature_layers: tuple[int, ...] | None = None,
    allow_other_base: bool = False,
    on_note: Callable[[str], None] = _silent,
) -> Heads:
    """The heads in a foreign folder, in float32 on the CPU, bound; their logits are compared with the reader's.

    draft_length: K of EAGLE-3 heads, by default what the folder says, or 4; Medusa's is their number. feature_layers:
    those of EAGLE-3 heads in our count, the input of layer i, where the folder does not say them beyond doubt.
    allow_other_base: take a base of the same sizes that the folder was not exported for. on_note: hears what is to be
    known of the heads. UserError on an unknown format, a folder that is not whole, another base, numbers that are not
    finite, and parts that are evidently exchanged.
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
        k = draft_length or reader.draft_length or _USUAL_LENGTH
        heads = _recurrent(reader, base, folder, k, feature_layers, on_note)
    other = _other_base(folder, base, allow_other_base)  # after the sizes, which tell more
    if names := not_finite(heads):
        raise UserError(
            f"{folder}: {named(names)} (as heads here call them) hold NaN or infinity; copy or write the folder again."
        )
    # Where the rows are the base's own, the folder may hold them rounded; so they are for the comparison.
    lent = Lent(base.embedding.cpu().float(), base.output_matrix.cpu().to(reader.dtype).float())
    compare(reader, heads.float().eval().bind(lent.embedding, lent.output_matrix), base, lent)
    heads.bind(lent.embedding, base.output_matrix.cpu().float())
    fit = check_arrangement(heads, base, str(folder))
    for note in (other, fit):
        if note:
            on_note(note)
    return heads


def is_saved(folder: Path) -> bool:
    """Whether a folder holds nothing but saved heads, which is what importing writes; or nothing at all."""
    return is_written(folder, {CONFIG, WEIGHTS, CARD}, CONFIG, DIGEST, str)


def _other_base(folder: Path, base: FrozenBase, allow: bool) -> str | None:
    """UserError where a folder was exported for another base than the given one; with `allow`, what that means. Only
    what we exported says for which."""
    trained = read_record(folder).get("base") or {}
    named_base = BaseRef(
        name=str(trained.get("name")),
        revision=trained.get("revision"),
        fingerprint=trained.get("fingerprint") or "",
        tokenizer_fingerprint=trained.get("tokenizer_fingerprint") or "",
    )
    found = difference(base, named_base)
    if found is None:
        return None
    told = f"--input {folder} was exported for a base with {found} than --base {base.name}"
    if allow:
        return f"warning: {told}; {OTHER_BASE}. The imported heads name this base."
    raise UserError(
        f"{told}; use the base it names ({named_base.name}, revision {named_base.revision or 'none'}). "
        f"--allow-other-base imports all the same: {OTHER_BASE}."
    )


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
    return _filled(config, tensors, base, reader.draft_ids, first if same else torch.stack(reader.outputs))


def _recurrent(
    reader: Eagle3Reader,
    base: FrozenBase,
    folder: Path,
    draft_length: int,
    layers: tuple[int, ...] | None,
    on_note: Callable[[str], None],
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
        feature_layers=_layers(reader, base, folder, layers, on_note),
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


def _layers(
    reader: Eagle3Reader,
    base: FrozenBase,
    folder: Path,
    asked: tuple[int, ...] | None,
    on_note: Callable[[str], None],
) -> tuple[int, ...]:
    """Feature layers in our count: as asked, as written, or what engines take where nothing is written."""
    last, doubtful, written = base.num_layers, reader.doubtful_ids, reader.layer_ids
    if asked is None and written is None and doubtful is not None:
        outputs = " ".join(str(layer + 1) for layer in doubtful)
        raise UserError(
            f"{folder} has eagle_aux_hidden_state_layer_ids {list(doubtful)} inside eagle_config alone, which SGLang "
            f"counts by outputs of layers and vLLM by inputs; say which: --feature-layers {outputs} if the heads were "
            f"made for SGLang (as those of SpecForge are), or --feature-layers {' '.join(map(str, doubtful))}."
        )
    usual = (2, last // 2, last - 3)
    layers = asked or written or usual
    if len(layers) != AUX_LAYERS or not all(0 <= layer <= last for layer in layers):
        whose = (
            f"{folder}: eagle_aux_hidden_state_layer_ids" if written else f"{folder} names no layers; what engines take"
        )
        raise UserError(
            f"{'--feature-layers' if asked else whose} is {' '.join(map(str, layers))}; "
            f"{'name' if asked else 'give --feature-layers with'} {AUX_LAYERS} from 0 (embedding) to {last} (after the "
            f"final norm) of base {base.name!r}{'' if asked else ', or the base that the heads were trained for'}."
        )
    if asked and written and asked != written:
        on_note(
            f"warning: --feature-layers is {' '.join(map(str, asked))}, and {folder} says {' '.join(map(str, written))}"
            "; the option is taken, and fewer drafts are accepted if the folder was right."
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
