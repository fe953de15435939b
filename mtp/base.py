"""The frozen base p: find it, freeze it, run it with a cache, return logits and features.

Knows: how a causal language model of transformers is put together (decoder layers, final norm, output matrix), checked
on a few tokens when it is loaded. Refuses to know: heads, sampling, training, and the vocabulary logits of positions
nobody asked for: `forward` stops at the final norm and `logits` is a separate call.

Shapes: B batch, T new positions, T_total cached plus new positions, D hidden, V vocabulary, F = D × feature layers.

Feature layer ids follow transformers' `hidden_states`: id i < L is the input of decoder layer i (0 = embeddings) and id
L the state after the final norm, which the output matrix reads.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mtp.anatomy import check_sizes, context_length, end_ids, find_inner, find_layers, freeze, layer_inputs, probe
from mtp.cache import BaseCache, new_cache, refusal
from mtp.errors import UserError
from mtp.fingerprint import model_checksum, model_fingerprint, tokenizer_fingerprint
from mtp.hub_access import HubAccess
from mtp.kernels import Kernels
from mtp.loading import choose_device, load
from mtp.output import OutputScale, project
from mtp.packed import packed_positions, packing_fault
from mtp.tree_mask import TreeMask, tree_fault

if TYPE_CHECKING:
    from mtp.one_call import Past

_CACHE_ARGUMENTS = ("cache", "past_key_values")  # transformers renamed the argument in 5.24
_UNKNOWN = "unknown"
MOST_STEP_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class BaseOutput:
    """hidden [B, T, D] after the final norm, for `FrozenBase.logits`; features [B, T, F] of the asked layers."""

    hidden: Tensor
    features: Tensor


Steps = Callable[[Tensor, BaseCache, Sequence[int], TreeMask | None], BaseOutput]
"""As `FrozenBase.forward`: tokens [1, R], cache, feature layers and tree."""


Several = Callable[[Tensor, "Past", Sequence[int]], BaseOutput]
"""As `Stack.several`."""


class FrozenBase:
    """A causal language model that is only ever read. Not an `nn.Module`: no parent module can train or save it."""

    def __init__(self, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> None:
        self.model, self.tokenizer, self.name, self.revision = model, tokenizer, name, revision
        freeze(model)
        self._inner = find_inner(model, name)
        self._layers = find_layers(self._inner, self._text_config, name)
        self._arguments = frozenset(inspect.signature(self._inner.forward).parameters)
        self._scale = OutputScale.from_config(self._text_config)
        check_sizes(self.embedding, self.output_matrix, int(self._text_config.hidden_size), tokenizer, name)
        self._tree_fault: str | None = _UNKNOWN
        self._packing_fault: str | None = _UNKNOWN
        self.quantised: str | None = None  # how its weights were rounded
        self.sharded = False  # over several devices: see `mtp.sharding`
        self._loaded_fingerprint: str | None = None
        self.kernels: Kernels | None = None  # for the logits of a few rows
        self.steps: Steps | None = None  # what runs over a few rows of one text; None is the model itself
        self.several: Several | None = None  # and over those of several texts
        self.final_norm = probe(model, self._inner, self.logits, name)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        home: Path | None = None,
        on_progress: Callable[[str], None] = lambda _: None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "FrozenBase":
        """Load a base by the name of an embedded one, a local transformers folder, a `.gguf` file or a Hub id.

        dtype: auto is float32 on the CPU and the checkpoint's own on an accelerator. home: where embedded bases are
        kept, the user's cache when None. on_progress: receives a sentence per stage of fetching an embedded base.
        token, cache_dir, local_files_only: for a Hub id, as in transformers; `revision` of the result is the commit.
        Raises UserError when the base is missing, damaged, or not a causal language model this class can verify; the
        message says what was tried and what to do.
        """
        chosen = choose_device(device)
        found = load(
            str(name),
            revision=revision,
            dtype=dtype,
            device=chosen,
            trust_remote_code=trust_remote_code,
            home=home,
            on_progress=on_progress,
            access=HubAccess(token=token, cache_dir=cache_dir, local_files_only=local_files_only),
        )
        return cls(found.model.to(chosen), found.tokenizer, str(name), found.revision or revision)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any, name: str, revision: str | None = None) -> "FrozenBase":
        """Wrap a model that is already loaded; it is frozen in place."""
        return cls(model, tokenizer, name, revision)

    def to(self, device: torch.device | str) -> "FrozenBase":
        """Move the model to `device`; its precision stays. What made its steps faster stays behind. One that is sharded
        is where it belongs."""
        if not self.sharded:
            self.model.to(device)
        self.kernels = self.steps = self.several = None
        return self

    # ---- facts -------------------------------------------------------------------------------------------------------

    @property
    def _text_config(self) -> Any:
        return self.model.config.get_text_config(decoder=True)

    @property
    def embedding(self) -> Tensor:
        """Input embedding [V, D]: the base's own storage, without gradient."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def output_matrix(self) -> Tensor:
        """Output matrix [V, D]: the base's own storage, without gradient; equal to the embedding when they are tied."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    @property
    def output_bias(self) -> Tensor | None:
        """Bias [V] of the output matrix, for the few bases that have one."""
        bias: Tensor | None = getattr(self.model.get_output_embeddings(), "bias", None)
        return None if bias is None else bias.detach()

    @property
    def hidden_size(self) -> int:
        return int(self.output_matrix.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the output matrix, which may be padded beyond the tokenizer's tokens."""
        return int(self.output_matrix.shape[0])

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        return self._layers

    @property
    def last_block(self) -> nn.Module:
        """The last decoder layer."""
        return self._layers[-1]

    @property
    def context_length(self) -> int:
        """Most positions the base was made for: from its config, else from its tokenizer, else 2**31 - 1."""
        return context_length(self._text_config, self.tokenizer)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.output_matrix.dtype

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a text: those of the generation config, then the tokenizer's."""
        return end_ids(self.model, self.tokenizer)

    # ---- running -----------------------------------------------------------------------------------------------------

    def new_cache(self) -> BaseCache:
        """An empty cache that can be rolled back exactly, or UserError naming the kind of cache the base would need."""
        if getattr(self.model, "_is_stateful", False):
            raise UserError(refusal(self.name, f"the recurrent state of {type(self.model).__name__}"))
        if self._cache_argument is None:
            raise UserError(refusal(self.name, f"the private cache of {type(self._inner).__name__}"))
        return new_cache(self.model.config, self.name)

    def require_trees(self) -> None:
        """UserError naming the base unless it can run over trees of tokens; found out once."""
        if self._tree_fault is _UNKNOWN:
            self._tree_fault = tree_fault(self)
        if self._tree_fault is not None:
            raise UserError(f"--tree cannot be used with base {self.name!r}: {self._tree_fault}; leave --tree out.")

    def require_packing(self) -> None:
        """UserError naming the base unless it can run on rows of several texts; found out once."""
        if self._packing_fault is _UNKNOWN:
            self._packing_fault = packing_fault(self)
        if self._packing_fault is not None:
            told = f"data.packing is true, which base {self.name!r} does not allow: {self._packing_fault}"
            raise UserError(f"{told}; set data.packing to false.")

    @property
    def takes_positions(self) -> bool:
        """Whether the place of each token can be given, as trees and packed rows need."""
        return "position_ids" in self._arguments

    @property
    def _cache_argument(self) -> str | None:
        return next((argument for argument in _CACHE_ARGUMENTS if argument in self._arguments), None)

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        *,
        cache: BaseCache | None = None,
        attention_mask: Tensor | None = None,
        feature_layers: Sequence[int] = (),
        tree: TreeMask | None = None,
        segments: Tensor | None = None,
    ) -> BaseOutput:
        """Run the base over new tokens [B, T] that follow what `cache` holds, and extend the cache by them.

        attention_mask [B, T_total] (1 or True = a real token) covers cached and new positions; a token's position is
        the number of real tokens before it, so left padding does not shift it. feature_layers: ids in 0…num_layers.
        tree: what each of the new tokens sees and where it stands (B = 1, without attention_mask); see `require_trees`.
        segments [B, T]: several texts in one row, each with the states it has alone (see `mtp.packed` and
        `require_packing`); without cache, attention_mask and tree.
        """
        self._check_layers(feature_layers)
        few = tokens.shape[0] == 1 and tokens.shape[1] <= MOST_STEP_ROWS
        if self.steps is not None and few and cache is not None and attention_mask is None and segments is None:
            return self.steps(tokens, cache, feature_layers, tree)
        with layer_inputs(self._layers, {*feature_layers} - {self.num_layers}) as states:
            if segments is None:
                hidden = self._run(tokens, cache, attention_mask, tree)
            else:
                assert cache is None and attention_mask is None and tree is None  # noqa: PT018
                self.require_packing()
                hidden = self.forward_at(tokens, packed_positions(segments))
        states[self.num_layers] = hidden
        if not feature_layers:
            return BaseOutput(hidden=hidden, features=hidden[..., :0])
        wanted = [states[layer] for layer in feature_layers]
        return BaseOutput(hidden=hidden, features=wanted[0] if len(wanted) == 1 else torch.cat(wanted, dim=-1))

    def _run(
        self, tokens: Tensor, cache: BaseCache | None, attention_mask: Tensor | None, tree: TreeMask | None
    ) -> Tensor:
        past = 0 if cache is None else cache.length
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": cache is not None}
        if cache is not None:
            assert self._cache_argument is not None
            arguments[self._cache_argument] = cache.native
        if attention_mask is not None:
            assert attention_mask.shape == (tokens.shape[0], past + tokens.shape[1])
            arguments["attention_mask"] = attention_mask
            if self.takes_positions:
                arguments["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
        if tree is not None:
            assert tokens.shape[0] == 1
            assert attention_mask is None
            arguments |= tree.arguments(past, self.dtype)
        hidden: Tensor = self._inner(**arguments).last_hidden_state
        if cache is not None:
            cache.advance(tokens.shape[1])
        return hidden

    @torch.no_grad()
    def forward_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """States [B, T, D] of tokens [B, T] at the places positions [B, T], without mask and cache."""
        hidden: Tensor = self._inner(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return hidden

    def _check_layers(self, feature_layers: Sequence[int]) -> None:
        for layer in feature_layers:
            if not 0 <= layer <= self.num_layers:
                raise UserError(f"feature_layers: id {layer} is outside 0…{self.num_layers} of base {self.name!r}.")

    def takes_at_once(self, rows: int) -> bool:
        """Whether `several` is there and pays for so many rows of all texts together."""
        return self.several is not None and self.kernels is not None and rows in self.kernels.rows

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [..., V] in float32 of states [..., D] after the final norm, scaled and capped by the base.

        The product runs in the base's precision, like the base's own. Differentiable in `hidden`.
        """
        output = project(hidden.to(self.dtype), self.output_matrix, self.output_bias, self.kernels)
        return self._scale(output if output.dtype == torch.float64 else output.float())

    # ---- identity ----------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Cheap hash by which heads recognise their base; see `mtp.fingerprint.model_fingerprint`. Of a quantised base
        it is that of the weights it was made of."""
        return self._loaded_fingerprint or model_fingerprint(self.model, self.vocab_size)

    def mark_quantised(self, kind: str) -> None:
        """Note that the weights are about to be rounded; see `mtp.quantise`."""
        self._loaded_fingerprint, self.quantised = self.fingerprint(), kind

    def mark_sharded(self, fingerprint: str) -> None:
        """Note that the weights are spread over several devices, and the fingerprint that they had; see
        `mtp.sharding`."""
        self._loaded_fingerprint, self.sharded = fingerprint, True

    def tokenizer_fingerprint(self) -> str:
        """Hash of vocabulary, special tokens and chat template; see `mtp.fingerprint.tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self.tokenizer)

    def checksum(self) -> str:
        """SHA-256 over every parameter and buffer: equal before and after means bit-identical weights."""
        return model_checksum(self.model)
