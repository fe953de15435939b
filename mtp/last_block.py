"""The blocks of a base in our own terms: sizes and type as a `BlockShape`, a verified copy of the last one as a
`Block`, and all of them as blocks that share the base's weights.

Knows: how common decoder layers are put together (an attention and an MLP of two to four matrices, two norms, rotary
frequencies kept by a module), read off the modules themselves instead of a list of families. Where a layout cannot be
read, such as how a fused matrix is divided, every candidate is tried, and only a copy that computes what the base's
block does is handed out.
Refuses to know: heads, and what a copy is good for.

Shapes: T position, D hidden, I MLP, H query heads, J key-value heads, G = H / J, E head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mtp.anatomy import find_inner
from mtp.base import FrozenBase
from mtp.config import BlockShape
from mtp.errors import UserError
from mtp.heads.blocks import Block, Norm, frequencies

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_PROBE_LENGTH = 6  # below every sliding window
_NONE = object()


class Matrix(NamedTuple):
    """weight [out,in] and bias [out] of a linear map."""

    weight: Tensor
    bias: Tensor | None

    def rows(self, index: Tensor) -> "Matrix":
        """Those rows of it, in that order."""
        return Matrix(self.weight[index], None if self.bias is None else self.bias[index])


def matrices(module: nn.Module) -> dict[str, Matrix]:
    """The linear maps that are the module's own children, by name, in the order of their definition."""
    found = {}
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            found[name] = Matrix(child.weight.detach(), None if child.bias is None else child.bias.detach())
        elif isinstance(child, Conv1D):
            found[name] = Matrix(child.weight.detach().T, child.bias.detach())
    return found


def _part(layer: nn.Module, *words: str) -> nn.Module:
    """The child that is named like `words` and has linear maps; the layer itself where there is none."""
    named = (child for name, child in layer.named_children() if any(word in name for word in words))
    return next((child for child in named if len(matrices(child)) > 1), layer)


def _attention(layer: nn.Module) -> nn.Module:
    return _part(layer, "att")


def _mlp(layer: nn.Module) -> nn.Module:
    return _part(layer, "mlp", "feed_forward", "ffn")


# ---- sizes and type --------------------------------------------------------------------------------------------------


def read_shape(base: FrozenBase, as_copy: bool = False) -> BlockShape:
    """The shape of a block like the base's last one; what cannot be read is as in Llama.

    A base without rotary embeddings has learned positions in its states. Our block then rotates by the usual formula,
    to tell drafts apart by place, unless it is to be a copy (`as_copy`) and must compute what the base's block does.
    """
    config: Any = base.model.config.get_text_config(decoder=True)
    size, heads = base.hidden_size, int(config.num_attention_heads)
    eps = (getattr(config, name, None) for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"))
    sizes: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or size // heads),
        "rms_norm_eps": next((float(value) for value in eps if value), 1e-5),
        "parallel_residual": bool(getattr(config, "use_parallel_residual", False)),
    }
    fallback = int(getattr(config, "intermediate_size", None) or 4 * size)
    shape = BlockShape(**sizes, **_type_of(base.last_block, config, fallback))
    return _with_rotation(shape, find_inner(base.model, base.name), config, as_copy)


def _type_of(layer: nn.Module, config: Any, fallback: int) -> dict[str, Any]:
    """The fields of a `BlockShape` that modules show; `fallback` is I where the MLP is none of the known ones."""
    attention, mlp = matrices(_attention(layer)), matrices(_mlp(layer))
    *rising, falling = mlp.values() if len(mlp) in (2, 3) else [None]
    width = fallback if falling is None else falling.weight.shape[1]
    rows = sum(0 if one is None else one.weight.shape[0] for one in rising)
    reading, output = _read_and_output(attention)
    names = (getattr(config, name, None) for name in ("hidden_act", "hidden_activation", "activation_function"))
    return {
        "intermediate_size": width,
        "norm": "layer" if any(isinstance(child, nn.LayerNorm) for child in layer.children()) else "rms",
        "gated": rows != width,
        "activation": next((_ACTIVATIONS[name] for name in names if name in _ACTIVATIONS), "silu"),
        "qkv_bias": any(one.bias is not None for one in reading),
        "output_bias": output is not None and output.bias is not None,
        "mlp_bias": falling is not None and falling.bias is not None,
        "qk_norm": hasattr(_attention(layer), "q_norm"),
    }


def _with_rotation(shape: BlockShape, inner: nn.Module, config: Any, as_copy: bool) -> BlockShape:
    """The shape with the base's rotary frequencies: by the formula where they follow it, else one by one."""
    kind = (getattr(config, "layer_types", None) or [""])[-1]
    parameters = getattr(config, "rope_parameters", None) or {}
    theta = parameters.get(kind, parameters).get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    by_formula = BlockShape(**(vars(shape) | {"rope_theta": float(theta)}))
    found = _rotary(inner, kind)
    if found is None:
        return BlockShape(**(vars(by_formula) | {"rope_frequencies": ()})) if as_copy else by_formula
    own, scale = found
    formula = frequencies(by_formula)
    if scale == 1.0 and own.shape == formula.shape and torch.allclose(own, formula, rtol=1e-5, atol=0):
        return by_formula
    return BlockShape(**(vars(by_formula) | {"rope_frequencies": tuple(own.tolist()), "rope_scale": scale}))


def _rotary(inner: nn.Module, kind: str) -> tuple[Tensor, float] | None:
    """Frequencies [at most E/2] and factor of the base's rotary embedding, for layers of `kind` where kinds differ."""
    for module in inner.modules():
        for prefix in (f"{kind}_", ""):
            own = getattr(module, f"{prefix}inv_freq", None)
            if isinstance(own, Tensor):
                return own.detach().float().cpu(), float(getattr(module, f"{prefix}attention_scaling", 1.0))
    return None


# ---- the copy --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_last_block(base: FrozenBase, shape: BlockShape) -> Block:
    """A copy of the base's last block, in float32 on its device. UserError unless it computes what the block does."""
    block = Block(base.hidden_size, shape).to(base.device)
    with _refusing(base):
        _fill_verified(block, base)
    return block


def _fill_verified(block: Block, base: FrozenBase) -> int:
    """Fill the block with the last block's weights in the first way, whose number is returned, in which it computes
    what that block does."""
    inputs, outputs = _observe(base)
    positions = torch.arange(_PROBE_LENGTH, device=base.device).unsqueeze(0)
    # Of what the block adds: in its output the unchanged input would hide a wrong copy.
    wanted, tolerance = outputs - inputs, 1e-3 if base.dtype.itemsize >= 4 else 0.1
    for number, _ in enumerate(_filled(block, base.last_block)):
        given = inputs.to(block.attention.o_proj.weight.dtype)
        added = block(given, positions, block.keys_values(given, positions)).float() - inputs
        if bool((added - wanted).abs().max() <= tolerance * wanted.abs().max()):
            return number
    raise Unreadable("a copy computes something else")


@torch.no_grad()
def share_blocks(base: FrozenBase) -> list[Block]:
    """All decoder layers as blocks that share their weights, without a copy where the layout allows. `Unreadable` where
    the last one cannot be read; that the others are like it remains to be checked."""
    shape = read_shape(base, as_copy=True)
    with torch.device("meta"):
        blocks = [Block(base.hidden_size, shape) for _ in base.layers]
    number = _fill_verified(blocks[-1], base)
    for block, layer in zip(blocks[:-1], base.layers, strict=False):
        if next(islice(_filled(block, layer), number, None), _NONE) is _NONE:
            raise Unreadable("its layers are put together in different ways")
    return blocks


@torch.no_grad()
def copy_final_norm(ours: Norm, base: FrozenBase) -> None:
    """Copy the base's final norm. UserError where it is of another type."""
    with _refusing(base):
        _copy_norm(ours, base.final_norm)


class Unreadable(Exception):
    """A layer is put together in a way this module does not know."""


@contextmanager
def _refusing(base: FrozenBase) -> Iterator[None]:
    try:
        yield
    except Unreadable as fault:
        raise UserError(
            f"heads.init is 'base', but the last block of base {base.name!r} ({type(base.last_block).__name__}) cannot "
            f"be copied: {fault}. Use heads.init: random."
        ) from None


def _observe(base: FrozenBase) -> tuple[Tensor, Tensor]:
    """What goes into the base's last block and comes out of it, each [1,T,D], on a few tokens."""
    seen: list[Any] = []
    hook = base.last_block.register_forward_hook(lambda module, arguments, output: seen.append(output))
    try:
        inputs = base.forward(some_tokens(base, _PROBE_LENGTH), feature_layers=(base.num_layers - 1,)).features
    finally:
        hook.remove()
    output: Tensor = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    return inputs.float(), output.float()


def some_tokens(base: FrozenBase, length: int) -> Tensor:
    """Tokens [1,length] from all over the vocabulary."""
    return torch.linspace(0, base.vocab_size - 1, length, device=base.device).long().unsqueeze(0)


def _filled(block: Block, layer: nn.Module) -> Iterator[None]:
    """Fill the block with the layer's weights, once for each way in which they can be understood."""
    norms = [child for child in layer.children() if _is_norm(child, block.attention.o_proj.out_features)]
    if len(norms) != 2:
        raise Unreadable(f"it has {len(norms)} norms instead of two")
    _copy_norm(block.attention_norm, norms[0])
    _copy_norm(block.mlp_norm, norms[1])
    attention, ours = _attention(layer), block.attention
    if ours.shape.qk_norm:
        for norm, name in ((ours.q_norm, "q_norm"), (ours.k_norm, "k_norm")):
            _copy_norm(norm, attention.get_submodule(name))
    found, output = _read_and_output(matrices(attention))
    for reading in _queries_keys_values(found, ours.shape):
        for linear, matrix in zip(
            (ours.q_proj, ours.k_proj, ours.v_proj, ours.o_proj), (*reading, output), strict=True
        ):
            _copy_matrix(linear, matrix)
        for gate, up, down in _gate_up_down(list(matrices(_mlp(layer)).values()), ours.shape):
            if ours.shape.gated:
                _copy_matrix(block.mlp.gate_proj, gate)
            _copy_matrix(block.mlp.up_proj, up)
            _copy_matrix(block.mlp.down_proj, down)
            yield


def _read_and_output(found: dict[str, Matrix]) -> tuple[list[Matrix], Matrix | None]:
    """Attention's matrices: queries, keys and values or the one that fuses them, which is the largest; the output."""
    names = ["q_proj", "k_proj", "v_proj"]
    if not set(names) <= set(found):
        names = sorted(found, key=lambda name: len(found[name].weight))[-1:]
    return [found[name] for name in names], next((found[name] for name in found if name not in names), None)


def _queries_keys_values(found: list[Matrix], shape: BlockShape) -> Iterator[tuple[Matrix, ...]]:
    """Three matrices as they are, or a fused one divided in each of the usual ways."""
    h, j, e = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
    if len(found) == 3:
        yield tuple(found)
        return
    if len(found) != 1 or len(found[0].weight) != (h + 2 * j) * e:
        raise Unreadable("its queries, keys and values were not found")
    fused = found[0]
    rows = torch.arange((h + 2 * j) * e, device=fused.weight.device)
    yield tuple(fused.rows(index) for index in rows.tensor_split([h * e, (h + j) * e]))  # one after another
    groups = rows.view(j, h // j + 2, e)  # key-value head by key-value head
    yield tuple(fused.rows(index.flatten()) for index in (groups[:, :-2], groups[:, -2], groups[:, -1]))


def _gate_up_down(found: list[Matrix], shape: BlockShape) -> Iterator[tuple[Matrix | None, Matrix, Matrix]]:
    """The matrices of the MLP; which of two is the gate can only be tried."""
    if len(found) == 2 and not shape.gated:
        yield None, found[0], found[1]
        return
    if len(found) == 2 and len(found[0].weight) == 2 * shape.intermediate_size:
        halves = torch.arange(len(found[0].weight), device=found[0].weight.device).chunk(2)
        found = [*(found[0].rows(index) for index in halves), found[1]]
    if len(found) != 3 or not shape.gated:
        raise Unreadable(f"its MLP has {len(found)} matrices of unknown use")
    yield found[0], found[1], found[2]
    yield found[1], found[0], found[2]


def _is_norm(module: nn.Module, size: int) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.LayerNorm) or (isinstance(weight, Tensor) and weight.shape == (size,))


def _copy_norm(ours: Norm, theirs: nn.Module) -> None:
    if isinstance(theirs, nn.LayerNorm) != isinstance(ours, nn.LayerNorm):
        raise Unreadable("norms of two types occur")
    own = theirs.weight
    weight = own.detach() if isinstance(own, Tensor) else torch.ones(ours.weight.shape, device=ours.weight.device)
    if isinstance(ours, nn.LayerNorm):
        _take(ours, "bias", theirs.bias.detach() if isinstance(theirs.bias, Tensor) else torch.zeros_like(weight))
    else:  # some families multiply by 1 + weight: the answer to ones tells
        weight = weight + (theirs(torch.ones_like(weight)) - weight).float().mean().round().to(weight.dtype)
    _take(ours, "weight", weight)


def _copy_matrix(ours: nn.Linear, theirs: Matrix | None) -> None:
    if theirs is None or theirs.weight.shape != ours.weight.shape:
        raise Unreadable(f"a matrix of {tuple(ours.weight.shape)} was not found")
    _take(ours, "weight", theirs.weight)
    if ours.bias is not None:
        _take(ours, "bias", theirs.weight.new_zeros(len(theirs.weight)) if theirs.bias is None else theirs.bias)


def _take(ours: nn.Module, name: str, values: Tensor) -> None:
    """Copy values into a parameter; one on the meta device, which has no storage, takes theirs."""
    parameter = getattr(ours, name)
    if parameter.is_meta:
        setattr(ours, name, nn.Parameter(values, requires_grad=False))
    else:
        parameter.copy_(values)
