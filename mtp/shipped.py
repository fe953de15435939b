"""Multi-token-prediction modules that a base's checkpoint ships, as the start of `sequential` heads.

Knows: two layouts by the names of their tensors, for modules whose block is one of ours:

    DeepSeek-V3   model.layers.{L + i}.  enorm, hnorm, eh_proj, shared_head.norm, and a decoder layer
    MiMo          model.mtp_layers.{i}.  token_layernorm, hidden_layernorm, input_proj, final_layernorm, and a layer

Which half of a projection reads the token is not written in the tensors: DeepSeek-V3 has `embed_hidden`, MiMo
`hidden_embed`. Engines feed both the base's state after the final norm, so heads that take them over need that layer.
Refuses to know: how a base is loaded, and to skip or guess any of the tensors. Modules with experts, latent or gated
attention have tensors that find no place, as have Qwen3-Next's, whose norms multiply by 1 + weight.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from mtp.base import FrozenBase
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
_BORROWED = ("embed_tokens", "shared_head.head")
_PARTS = {"self_attn.": "block.attention.", "mlp.": "block.mlp."}


class Shipped(NamedTuple):
    """The tensors of modules by their names in the checkpoint, and which half of their projections comes first."""

    tensors: dict[str, Tensor]
    order: Order


def checkpoint_folder(base: FrozenBase) -> Path:
    """Where the base's safetensors lie. UserError for a base that has none, such as a .gguf file."""
    folder = Path(base.name).expanduser()
    if not folder.is_dir():
        try:  # a Hub id, whose files are here since the base was loaded
            folder = Path(snapshot_download(base.name, revision=base.revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError):
            folder = Path()
    if folder == Path() or not any(folder.glob("*.safetensors")):
        raise UserError(
            f"heads.init is shipped, but the base {base.name!r} has no safetensors of its own to read modules from; "
            "use init: base."
        )
    return folder


def read_shipped(folder: Path, num_layers: int, depths: int) -> Shipped:
    """The first `depths` modules in a base's files: its layers from `num_layers` on, or those called `mtp_layers`.

    Copies of the base's own embedding and output matrix are left out; heads borrow those. UserError where there are
    fewer modules.
    """
    found: dict[int, dict[str, Tensor]] = {}
    order: Order = "embed_hidden"
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                match = _MODULE.fullmatch(name)
                mimo = ".mtp_layers." in name
                if match and (mimo or int(match[1]) >= num_layers) and not match[2].endswith(_BORROWED):
                    found.setdefault(int(match[1]), {})[name] = file.get_tensor(name)
                    order = "hidden_embed" if mimo else order
    if len(found) < depths:
        raise UserError(
            f"heads.draft_length is {depths} and {folder} ships {len(found)} modules of a kind that is known; lower "
            "it, or use init: base."
        )
    return Shipped({name: t for number in sorted(found)[:depths] for name, t in found[number].items()}, order)


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
