"""From a base to heads: build what fits, and start it as the options say.

Knows: which layers heads usually read. Refuses to know: how a block is read off a base (`mtp.last_block`), training,
decoding, and how a base is found.

Shapes: D hidden, V vocabulary, Vd draft vocabulary.
"""

from dataclasses import asdict

from torch import Tensor

from mtp.base import FrozenBase
from mtp.base_start import start_from_base
from mtp.config import WITH_BLOCK, BaseRef, HeadsConfig, HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, SequentialHeads, build_heads
from mtp.last_block import read_shape
from mtp.shipped import checkpoint_folder, from_shipped, read_shipped
from mtp.vocab import vocab_hash


def describe(options: HeadsOptions, base: FrozenBase, draft_ids: Tensor | None = None) -> HeadsConfig:
    """The complete config of heads that `options` ask for on `base`; draft_ids [Vd] None is the whole vocabulary."""
    chosen = asdict(options)
    chosen["feature_layers"] = _feature_layers(options, base.num_layers)
    if draft_ids is not None:
        chosen |= {"draft_vocab_size": len(draft_ids), "draft_vocab_hash": vocab_hash(draft_ids)}
    return HeadsConfig(
        **chosen,
        hidden_size=base.hidden_size,
        vocab_size=base.vocab_size,
        block=read_shape(base, as_copy=options.init == "base") if options.kind in WITH_BLOCK else None,
        base=BaseRef(
            name=base.name,
            revision=base.revision,
            fingerprint=base.fingerprint(),
            tokenizer_fingerprint=base.tokenizer_fingerprint(),
        ),
    )


def new_heads(options: HeadsOptions, base: FrozenBase, draft_ids: Tensor | None = None) -> Heads:
    """Fresh heads for `base`, on its device, in float32, bound to it."""
    heads = build_heads(describe(options, base, draft_ids))
    if heads.draft_ids is not None:
        assert draft_ids is not None, "heads with a draft vocabulary need its ids"
        heads.draft_ids.copy_(draft_ids)
    heads.to(base.device).bind(base.embedding, base.output_matrix)
    if options.init == "base":
        start_from_base(heads, base)
    if isinstance(heads, SequentialHeads) and options.init == "shipped":
        found = read_shipped(checkpoint_folder(base), base.num_layers, options.draft_length)
        from_shipped(heads, found.tensors, found.order)
    return heads


def _feature_layers(options: HeadsOptions, num_layers: int) -> tuple[int, ...]:
    """The layers to read: as asked, else a low, a middle and a high one for recurrent and one for all other kinds.

    The ids 2, L/2 and L-3 of EAGLE-3 (arXiv 2503.01840), kept apart and inside bases that are too shallow for them; the
    one is the last state. But blocks that stand in for the base's last one read its input: those of `parallel` heads
    (arXiv 2404.19737), and copies of it.
    """
    layers = options.feature_layers
    if layers is None:
        replaces_last = options.kind == "parallel" or options.init == "base"
        if options.kind == "recurrent":
            high = num_layers - 1 if replaces_last else max(num_layers - 3, 0)
            return tuple(sorted({min(2, num_layers), num_layers // 2, high}))
        return (num_layers - 1 if replaces_last else num_layers,)
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise UserError(
            f"heads.feature_layers is {list(layers)}; name different ids from 0 (embedding) to {num_layers} (after the "
            "final norm), or null for the usual ones."
        )
    if options.kind != "recurrent" and len(layers) != 1:
        raise UserError(
            f"heads.feature_layers is {list(layers)}; {options.kind} heads read one layer, null picks the usual one."
        )
    return layers
