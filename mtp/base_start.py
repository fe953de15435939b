"""Heads that start as the base's own last block and final norm (`heads.init: base`).

    recurrent   fc is the identity on the highest feature layer; queries, keys and values read the state's half of the
                input by the block's matrices and the token's half by zeros
    sequential  M_k is the identity on the state's half; each block is the copy
    parallel    each block is the copy

Where heads read the input of the base's last block, as they usually do with this start, all parallel heads and the
first position of recurrent heads begin as the base's own prediction; other positions begin near it.

Knows: the three kinds with a block. Refuses to know: how a base's block is read (`mtp.last_block`), and training.

Shapes: B batch, T position, D hidden, F features.
"""

import torch
from torch import Tensor, nn

from mtp.base import FrozenBase
from mtp.heads import Heads, ParallelHeads, RecurrentHeads, SequentialHeads
from mtp.heads.blocks import Block
from mtp.last_block import copy_final_norm, copy_last_block, some_tokens

_TOKENS = 64  # on which the scale of a feature layer is measured


@torch.no_grad()
def start_from_base(heads: Heads, base: FrozenBase) -> None:
    """Set the weights of heads with a block (see the module). UserError where the base's block cannot be copied."""
    shape = heads.config.block
    assert shape is not None, "only kinds with a block can start from the base's"
    copy = copy_last_block(base, shape)
    if isinstance(heads, RecurrentHeads):
        _start_recurrent(heads, base, copy)
    elif isinstance(heads, SequentialHeads):
        _start_sequential(heads, base, copy)
    elif isinstance(heads, ParallelHeads):
        for k in range(1, heads.config.draft_length + 1):
            heads.block(k).load_state_dict(copy.state_dict())
        copy_final_norm(heads.norm, base)


def _start_recurrent(heads: RecurrentHeads, base: FrozenBase, copy: Block) -> None:
    size, layers = heads.config.hidden_size, heads.config.feature_layers
    highest = layers.index(max(layers)) * size
    nn.init.zeros_(heads.fc.weight)
    heads.fc.weight[:, highest : highest + size] = torch.eye(size)
    weights = copy.attention.state_dict()
    for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        weights[name] = torch.cat([torch.zeros_like(weights[name]), weights[name]], dim=1)  # [e ; g]
    heads.attention.load_state_dict(weights)
    _reset_norm(heads.embed_norm)
    for ours, theirs in ((heads.hidden_norm, copy.attention_norm), (heads.mlp_norm, copy.mlp_norm)):
        ours.load_state_dict(theirs.state_dict())
    heads.mlp.load_state_dict(copy.mlp.state_dict())
    copy_final_norm(heads.norm, base)
    if heads.config.eagle31_norms:
        for norm, layer in zip(heads.feature_norms, layers, strict=True):
            _reset_norm(norm, _scale(base, layer, norm))


def _start_sequential(heads: SequentialHeads, base: FrozenBase, copy: Block) -> None:
    size = heads.config.hidden_size
    for k in range(1, heads.config.draft_length + 1):
        depth = heads.depth(k)
        nn.init.zeros_(depth.projection.weight)
        state = slice(size, None) if depth.embed_first else slice(0, size)
        depth.projection.weight[:, state] = torch.eye(size)
        _reset_norm(depth.embed_norm)
        # What the block adds has the size that suits the base's states, so what it is added to must have theirs.
        _reset_norm(depth.hidden_norm, _scale(base, heads.config.feature_layers[0], depth.hidden_norm))
        depth.block.load_state_dict(copy.state_dict())
        copy_final_norm(depth.norm, base)


def _reset_norm(norm: nn.Module, height: float = 1.0) -> None:
    """A norm that leaves entries of this size, all alike."""
    for name, parameter in norm.named_parameters():
        nn.init.constant_(parameter, height if name == "weight" else 0.0)


def _scale(base: FrozenBase, layer: int, norm: nn.Module) -> float:
    """The usual size of a feature layer's entries, in the sense of the norm: about their mean, or about zero."""
    tokens = some_tokens(base, min(_TOKENS, base.context_length))
    features: Tensor = base.forward(tokens, feature_layers=(layer,)).features.float()
    if isinstance(norm, nn.LayerNorm):
        features = features - features.mean(-1, keepdim=True)
    return float(features.square().mean(-1).sqrt().median())
