"""From a base to heads: read the sizes off it and build what fits.

Knows: which sizes of a base's configuration describe its block, and which layers heads usually read. Refuses to know:
training, decoding, and how a base is found.

Shapes: D hidden, V vocabulary, Vd draft vocabulary.
"""

from dataclasses import asdict
from typing import Any

from torch import Tensor

from mtp.base import FrozenBase
from mtp.config import BaseRef, BlockShape, HeadsConfig, HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, build_heads
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
        block=_block_shape(base) if options.kind == "recurrent" else None,
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
    return heads.to(base.device).bind(base.embedding, base.output_matrix)


def _feature_layers(options: HeadsOptions, num_layers: int) -> tuple[int, ...]:
    """The layers to read: as asked, else the last state for medusa and a low, a middle and a high one for recurrent.

    The ids 2, L/2 and L-3 of EAGLE-3 (arXiv 2503.01840), kept apart and inside bases that are too shallow for them.
    """
    layers = options.feature_layers
    if layers is None:
        if options.kind == "medusa":
            return (num_layers,)
        return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))
    wrong = [layer for layer in layers if not 0 <= layer <= num_layers]
    if wrong or not layers or len(set(layers)) < len(layers):
        raise UserError(
            f"heads.feature_layers is {list(layers)}; name different ids from 0 (embedding) to {num_layers} (after the "
            "final norm), or null for the usual ones."
        )
    if options.kind == "medusa" and len(layers) != 1:
        raise UserError(f"heads.feature_layers is {list(layers)}; medusa heads read one layer, usually [{num_layers}].")
    return layers


def _block_shape(base: FrozenBase) -> BlockShape:
    """Sizes of the base's own block, from its configuration; families name them differently."""
    config: Any = base.model.config.get_text_config(decoder=True)
    size, heads = base.hidden_size, int(config.num_attention_heads)
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    eps = (getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))
    return BlockShape(
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * size),
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or size // heads),
        rms_norm_eps=next((float(value) for value in eps if value), 1e-5),
        rope_theta=float(theta),
    )
