"""Multi-token-prediction modules that a base's checkpoint ships, as the start of `sequential` heads.

Knows: two layouts by the names of their tensors, for modules whose block is one of ours:

    DeepSeek-V3   model.layers.{L + i}.  enorm, hnorm, eh_proj, shared_head.norm, and a decoder layer
    MiMo          model.mtp_layers.{i}.  token_layernorm, hidden_layernorm, input_proj, final_layernorm, and a layer

Which half of a projection reads the token is not written in the tensors: DeepSeek-V3 has `embed_hidden`, MiMo
`hidden_embed`. Engines feed both the base's state after the final norm, so heads that take them over need that layer.
Refuses to know: where the tensors come from, and to skip or guess any of them. Modules with experts, latent or gated
attention have tensors that find no place, as have Qwen3-Next's, whose norms multiply by 1 + weight.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from mtp.config import Order
from mtp.errors import UserError
from mtp.heads import SequentialHeads

_MODULE = re.compile(r"model\.(?:mtp_)?layers\.(\d+)\.(.+)\.(weight|bias)")
_OURS = {
    "enorm": "embed_norm",
    "token_layernorm": "embed_norm",
    "hnorm": "hidden_norm",
    "hidden_layernorm": "hidden_norm",
    "eh_proj": "projection",
    "input_proj": "projection",
    "shared_head.norm": "norm",
    "final_layernorm": "norm",
    "input_layernorm": "block.attention_norm",
    "post_attention_layernorm": "block.mlp_norm",
}
_PARTS = {"self_attn.": "block.attention.", "mlp.": "block.mlp."}


@torch.no_grad()
def from_shipped(heads: SequentialHeads, tensors: Mapping[str, Tensor], order: Order) -> None:
    """Fill all depths of `heads` from the tensors of as many modules, by their names in the checkpoint.

    order: which half of the tensors' projections comes first; where the heads have the other order, halves are
    exchanged. UserError names every tensor that is unknown, missing or of another shape; the heads are then unchanged.
    """
    numbers = sorted({int(found[1]) for name in tensors if (found := _MODULE.fullmatch(name))})
    ours = {name: _our_name(name, numbers) for name in tensors}
    expected = {name: tensor for name, tensor in heads.state_dict().items() if name != "draft_ids"}
    problems = [f"{name} is not known" for name, our in ours.items() if our not in expected]
    problems += [f"nothing was given for {our}" for our in expected if our not in ours.values()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)} instead of {tuple(expected[our].shape)}"
        for name, our in ours.items()
        if our in expected and tensors[name].shape != expected[our].shape
    ]
    if len(set(ours.values())) < len(ours):
        problems.append("two tensors are for the same place")
    if problems:
        raise UserError(
            f"the shipped modules {numbers} do not fill the {heads.config.draft_length} depths of these heads: "
            f"{'; '.join(problems)}. Give just the tensors of as many modules, without copies of the base's embedding "
            "and output matrix; modules of another kind of block cannot be used."
        )
    for name, our in ours.items():
        tensor = tensors[name]
        if our.endswith("projection.weight") and order != heads.config.concat_order:
            tensor = torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)
        expected[our].copy_(tensor)


def _our_name(name: str, numbers: list[int]) -> str:
    """The name in our state of a tensor, or one that is nowhere in it."""
    found = _MODULE.fullmatch(name)
    if not found:
        return name
    number, place, kind = found.groups()
    for theirs, part in _PARTS.items():
        if place.startswith(theirs):
            return f"depths.{numbers.index(int(number))}.{part}{place.removeprefix(theirs)}.{kind}"
    return f"depths.{numbers.index(int(number))}.{_OURS.get(place, name)}.{kind}"
