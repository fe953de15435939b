"""The parts of a transformers model: where they are, and whether they do what the rest of the package relies on.

Knows: how to freeze a model, how to find the decoder below the output matrix and its layers, how to read what goes into
these, where a config says how long texts may be and how they end, and how to check on a few tokens that the model is
causal and that its logits are understood. Refuses to know: caches, features, heads.

Shapes: B batch, T position, D hidden, V vocabulary.
"""

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mtp.errors import UserError
from mtp.gguf_file import quiet_transformers

CONTEXT_UNKNOWN = 2**31 - 1


def _stay_in_eval(self: nn.Module, mode: bool = True) -> nn.Module:
    return self


def freeze(model: nn.Module) -> None:
    model.eval()
    model.requires_grad_(False)
    # A parent module that holds the model would switch dropout on by train(); the frozen base ignores that.
    model.train = types.MethodType(_stay_in_eval, model)  # type: ignore[method-assign]


def find_inner(model: Any, name: str) -> nn.Module:
    """The decoder below the output matrix, whose `last_hidden_state` is the state after the final norm."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    if inner is None or inner is model:
        inner = model.base_model
    if inner is model or model.get_output_embeddings() is None:
        raise UserError(
            f"base {name!r} ({type(model).__name__}) has no output matrix over an inner decoder; use a causal model."
        )
    found: nn.Module = inner
    return found


def find_layers(inner: nn.Module, config: Any, name: str) -> nn.ModuleList:
    """The one list of modules that is as long as the config says there are decoder layers."""
    count = int(config.num_hidden_layers)
    lists = [module for module in inner.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    outermost = [one for one in lists if not any(one is not other and one in other.modules() for other in lists)]
    if len(outermost) != 1:
        raise UserError(
            f"base {name!r} ({type(inner).__name__}): {len(outermost)} lists of {count} decoder layers were found "
            "instead of one, so its features cannot be read; use a base of a common decoder architecture."
        )
    return outermost[0]


def check_sizes(embedding: Tensor, output_matrix: Tensor, hidden_size: int, tokenizer: Any, name: str) -> None:
    """UserError unless embedding [V, D] and output matrix [V, D] fit the hidden size D and the tokenizer."""
    rows, width = output_matrix.shape
    if width != hidden_size or embedding.shape != (rows, width):
        raise UserError(
            f"base {name!r} has embedding {tuple(embedding.shape)} and output matrix {(rows, width)} for hidden size "
            f"{hidden_size}; both must be vocabulary × hidden size: use another base."
        )
    if tokenizer is not None and len(tokenizer) > rows:
        raise UserError(
            f"base {name!r}: its tokenizer has {len(tokenizer)} tokens and its vocabulary only {rows}; the tokenizer "
            "belongs to another model."
        )


def context_length(config: Any, tokenizer: Any) -> int:
    """Most positions a base was made for: from its config, else from its tokenizer, else 2**31 - 1."""
    configured = getattr(config, "max_position_embeddings", None)
    if configured:
        return int(configured)
    return min(int(getattr(tokenizer, "model_max_length", None) or CONTEXT_UNKNOWN), CONTEXT_UNKNOWN)


def end_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a text: those of the generation config, then the tokenizer's."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = list(configured) if isinstance(configured, (list, tuple)) else [configured]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return tuple(dict.fromkeys(int(i) for i in ids if i is not None))


@contextlib.contextmanager
def layer_inputs(layers: nn.ModuleList, wanted: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Inside the block, the inputs of the wanted layers are kept in the yielded dictionary."""
    states: dict[int, Tensor] = {}
    handles = [layers[i].register_forward_pre_hook(_recorder(states, i), with_kwargs=True) for i in wanted]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _recorder(states: dict[int, Tensor], layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def record(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        states[layer] = positional[0] if positional else named["hidden_states"]

    return record


@torch.no_grad()
def probe(model: Any, inner: nn.Module, logits: Callable[[Tensor], Tensor], name: str) -> nn.Module:
    """Run the model's own forward on a few tokens and compare; returns the module of the final norm.

    Two rows differ in their last token only: the states before it must agree, or the model is not causal. `logits`
    [B, T, V] of the last states [B, T, D] must be the model's own logits. Raises UserError otherwise.
    """
    device = model.get_output_embeddings().weight.device
    tokens_BT = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], device=device)
    calls: list[tuple[nn.Module, Any]] = []
    watched = [inner, *inner.children()]
    hooks = [
        module.register_forward_hook(lambda module, _, output: calls.append((module, output))) for module in watched
    ]
    try:
        with quiet_transformers():  # some models warn that a padding token occurs
            expected_BTV = model(input_ids=tokens_BT, use_cache=False).logits.float()
    finally:
        for hook in hooks:
            hook.remove()
    hidden_BTD: Tensor = calls[-1][1].last_hidden_state
    _require_finite(expected_BTV, name)
    _require_causal(hidden_BTD, f"{name!r} ({type(model).__name__})")
    _require_same_logits(logits(hidden_BTD), expected_BTV, hidden_BTD.dtype, f"{name!r} ({type(model).__name__})")
    norms = [module for module, output in calls[:-1] if isinstance(output, Tensor) and _equal(output, hidden_BTD)]
    return norms[-1] if norms else nn.Identity()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(a.equal(b))


def _require_finite(logits: Tensor, name: str) -> None:
    broken = int((~logits.isfinite()).sum())
    if broken:
        raise UserError(
            f"base {name!r} gives {broken} of {logits.numel()} logits that are not finite; use dtype bfloat16 or "
            "float32, and if that does not help, fetch the base again."
        )


def _require_causal(hidden: Tensor, name: str) -> None:
    """`hidden` [2, T, D] of two rows that differ in the last token."""
    tolerance = 1e-4 if hidden.dtype.itemsize >= 4 else 32 * torch.finfo(hidden.dtype).eps
    if not _close(hidden[0, :-1], hidden[1, :-1], tolerance):
        raise UserError(
            f"base {name} is not causal: its state at a position depends on later tokens; give a causal language model."
        )


def _require_same_logits(actual: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    tolerance = 1e-4 if dtype.itemsize >= 4 else 4 * torch.finfo(dtype).eps
    if not _close(actual, expected, tolerance):
        raise UserError(
            f"base {name} turns its last state into logits in a way this version does not know, so exact decoding "
            "cannot be promised; use another base."
        )


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Within `tolerance` of the largest expected value."""
    return bool((actual - expected).abs().max() <= tolerance * expected.abs().max())
