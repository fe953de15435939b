"""The base's decoder layers as a stack of our own blocks, sharing its weights: steps of a few rows at little cost.

Knows: how to run the blocks over rows that follow what a cache holds, in one call of the kernels where these can, and
how to find out on a few tokens that this gives the base's own states. A base for which it does not is refused with the
reason, and runs in transformers.
Refuses to know: heads, sampling, and how the caches of several texts are kept.

Shapes: R new rows, T_past cached positions, T = T_past + R, D hidden, H query heads, J key-value heads, G = H / J, E
head size.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtp.base import BaseOutput, FrozenBase, Steps
from mtp.cache import BaseCache, Buffers, RollbackLayer
from mtp.errors import UserError
from mtp.heads.blocks import Block, Turn, add_mlp
from mtp.kernels import Kernels
from mtp.last_block import Unreadable, share_blocks, some_tokens
from mtp.layers import RMSNorm, use_kernels
from mtp.one_call import OneCall, Past, Text, fits
from mtp.tree_mask import TreeMask

_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")  # of transformers: those that no length of the text changes
Keep = Callable[[int, Tensor, Tensor], Buffers]
"""Takes a block's number and its new keys and values [1, J, R, E]; gives those that its queries look at."""
_PROBE = 9  # tokens: some that are read first, and some that follow in one forward
_PROBE_READ = 5


class Stack:
    """Call `Stack.of`. Not a module: nothing here is trained, saved or moved."""

    def __init__(self, base: FrozenBase, blocks: Sequence[Block], norm: nn.Module, kernels: Kernels | None) -> None:
        self.base, self.blocks, self.norm = base, list(blocks), norm
        for module in (*self.blocks, norm):
            use_kernels(module, kernels)
        shape = self.blocks[0].attention.shape
        self._groups = shape.num_attention_heads // shape.num_key_value_heads
        able = kernels is not None and all(map(fits, self.blocks))
        self.one_call = OneCall(kernels, self.blocks, base.hidden_size) if kernels is not None and able else None

    @classmethod
    @torch.no_grad()
    def of(cls, base: FrozenBase, kernels: Kernels | None = None) -> "Stack":
        """The stack of a base, or `Unreadable`: why there is none that computes what the base does."""
        _check_kind(base)
        stack = cls(base, share_blocks(base), _final_norm(base), kernels)
        stack.compare(stack.forward)
        return stack

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, cache: BaseCache, feature_layers: Sequence[int] = (), tree: TreeMask | None = None
    ) -> BaseOutput:
        """As `FrozenBase.forward` for one text: tokens [1, R] behind what `cache` holds, which is extended by them."""
        rows, past = tokens.shape[1], cache.length
        places = torch.arange(rows, device=tokens.device) if tree is None else tree.depths
        turn = self.blocks[0].attention.turn((past + places)[None], self.base.dtype)
        hidden = F.embedding(tokens, self.base.embedding)
        if self.one_call is not None and rows in self.one_call.kernels.rows:
            states = self._at_once(self.one_call, hidden, turn, cache, tree)
        else:
            states = self._one_by_one(hidden, turn, partial(_update, cache), self._mask(rows, past, tree))
        cache.advance(rows)
        return self.output(states, feature_layers)

    def buffers(self, places: int) -> list[Buffers]:
        """For `fixed`: of each block [1, J, places, E], filled, as even what is masked must be finite."""
        shape, like = self.blocks[0].attention.shape, self.base.embedding
        size = 1, shape.num_key_value_heads, places, shape.head_dim
        return [(like.new_zeros(size), like.new_zeros(size)) for _ in self.blocks]

    def fixed(
        self, tokens: Tensor, start: Tensor, visible: Tensor, depths: Tensor, buffers: Sequence[Buffers]
    ) -> Tensor:
        """What each block reads and the last one writes [L + 1, 1, R, D], of tokens [1, R] behind the first start []
        places of the buffers, which they follow there. Row r sees those and visible[r] [R, R], at depths[r] [R] behind
        them. The same work on tensors of the same shapes whatever the numbers, so that it can be recorded."""
        places = start + torch.arange(tokens.shape[1], device=tokens.device)
        mask = _fixed_mask(start, visible, buffers[0][0].shape[2], self.base.dtype)
        mask = mask.repeat_interleave(self._groups, dim=0)
        turn = self.blocks[0].attention.turn((start + depths)[None], self.base.dtype)

        def keep(layer: int, keys: Tensor, values: Tensor) -> Buffers:
            for buffer, new in zip(buffers[layer], (keys, values), strict=True):
                buffer.index_copy_(2, places, new)
            return buffers[layer]

        return torch.stack(self._one_by_one(F.embedding(tokens, self.base.embedding), turn, keep, mask))

    def output(self, states: list[Tensor], feature_layers: Sequence[int]) -> BaseOutput:
        """Of what each block reads and the last one writes, the latter normalised, and the layers asked for."""
        hidden = states[-1] = self.norm(states[-1])
        wanted = [states[layer] for layer in feature_layers]
        return BaseOutput(hidden=hidden, features=torch.cat(wanted, dim=-1) if wanted else hidden[..., :0])

    def _one_by_one(self, hidden: Tensor, turn: Turn, keep: Keep, mask: Tensor | None) -> list[Tensor]:
        """What each block reads and the last one writes, each [1, R, D]."""
        states = [hidden]
        for layer, block in enumerate(self.blocks):
            inputs = block.attention_norm(hidden)
            queries = block.attention.queries(inputs, turn)
            keys, values = block.attention.keys_values(inputs, turn)
            mixed = _attend(queries, *keep(layer, keys.transpose(1, 2), values.transpose(1, 2)), mask)
            hidden = add_mlp(hidden, block.attention.output(mixed), block.mlp_norm, block.mlp)
            states.append(hidden)
        return states

    def _at_once(
        self, one_call: OneCall, hidden: Tensor, turn: Turn, cache: BaseCache, tree: TreeMask | None
    ) -> list[Tensor]:
        """As `_one_by_one`."""
        shape = self.blocks[0].attention.shape
        like = hidden.new_empty(1, shape.num_key_value_heads, 0, shape.head_dim)
        buffers = [kept.extend(hidden.shape[1], like) for kept in cache.layers]
        _, _, capacity, size = buffers[0][0].shape
        past = Past(buffers, (capacity * size, size), [Text(hidden.shape[1], cache.length)])
        return list(one_call.run(hidden[0], turn, past, None if tree is None else tree.visible).unsqueeze(1))

    @torch.no_grad()
    def several(self, tokens: Tensor, past: Past, feature_layers: Sequence[int] = ()) -> BaseOutput:
        """In one call, new tokens [N] of several texts, text by text: hidden [N, D] and features [N, F]. A row gets the
        numbers that it gets alone."""
        assert self.one_call is not None, "there are no kernels for these blocks"
        positions = torch.cat([torch.arange(text.length, text.length + text.rows) for text in past.texts])
        turn = self.blocks[0].attention.turn(positions[None], self.base.dtype)
        states = list(self.one_call.run(F.embedding(tokens, self.base.embedding), turn, past))
        return self.output(states, feature_layers)

    def _mask(self, rows: int, past: int, tree: TreeMask | None) -> Tensor | None:
        """What is added to the scores of the G R queries of a key-value head [R * G, T]; None for a single row."""
        if rows == 1:
            return None
        device = self.base.device
        seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril() if tree is None else tree.visible
        mask = torch.zeros(rows, past + rows, dtype=self.base.dtype, device=device)
        mask[:, past:].masked_fill_(~seen, torch.finfo(mask.dtype).min)
        return mask.repeat_interleave(self._groups, dim=0)

    def compare(self, forward: Steps) -> None:
        """`Unreadable` unless states after a prompt and with a cache are those of the base."""
        tokens, layers = some_tokens(self.base, _PROBE), tuple(range(self.base.num_layers + 1))
        ours, theirs = self.base.new_cache(), self.base.new_cache()
        tolerance = 1e-4 if self.base.dtype.itemsize >= 4 else 0.05
        for part in (tokens[:, :_PROBE_READ], tokens[:, _PROBE_READ:-1], tokens[:, -1:]):
            found = forward(part, ours, layers, None).features.chunk(len(layers), -1)
            wanted = self.base.forward(part, cache=theirs, feature_layers=layers).features.chunk(len(layers), -1)
            for layer, (one, other) in enumerate(zip(found, wanted, strict=True)):
                if not bool((one - other).abs().max() <= tolerance * other.abs().max()):
                    raise Unreadable(f"states at layer {layer} come out differently")


def _update(cache: BaseCache, layer: int, keys: Tensor, values: Tensor) -> Buffers:
    kept: Buffers = cache.layers[layer].update(keys, values)
    return kept


def _fixed_mask(start: Tensor, visible: Tensor, places: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores [R, places] of rows that see the first start [] places, and of those behind them
    visible [R, R]."""
    behind = torch.arange(places, device=visible.device) - start
    rows = visible.shape[0]
    seen = (behind < 0) | (visible[:, behind.clamp(0, rows - 1)] & (behind < rows))
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Queries [1,R,J,G,E] over keys and values [1,J,T,E] to [1,R,J,G,E]. The G queries of a key-value head stand where
    attention expects positions, so that keys need no repeating."""
    _, rows, heads, groups, size = queries.shape
    folded = queries.permute(0, 2, 1, 3, 4).reshape(1, heads, rows * groups, size)
    mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
    return mixed.view(1, heads, rows, groups, size).permute(0, 2, 1, 3, 4)


def _check_kind(base: FrozenBase) -> None:
    """`Unreadable` for what a few tokens would not show: windows, and rotations that change with the text's length."""
    config = base.model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default") if isinstance(parameters, dict) else "default"
    if kind not in _FIXED_ROTATIONS:
        raise Unreadable(f"its rotary embedding is of type {kind}")
    try:
        cache = base.new_cache()
    except UserError as error:
        raise Unreadable(str(error)) from None
    if cache.slides or getattr(config, "attention_layers", None):
        raise Unreadable("some of its layers see a window only")
    if len(cache.layers) != base.num_layers or not all(isinstance(layer, RollbackLayer) for layer in cache.layers):
        raise Unreadable("some of its layers keep no keys of their own")


def _final_norm(base: FrozenBase) -> nn.Module:
    """The base's final norm as one of ours where it is of the plain kind, so that kernels can compute it."""
    theirs = base.final_norm
    weight, eps = getattr(theirs, "weight", None), getattr(theirs, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or not isinstance(eps, float):
        return theirs
    ours = RMSNorm(len(weight), eps=eps, device="meta")
    ours.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return ours
