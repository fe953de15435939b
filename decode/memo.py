"""A base and heads that remember what they returned, so that one text can be begun thousands of times.

Knows: that logits and features are functions of the tokens so far, and drafts' logits of these and the drafts. Refuses
to know what is done with them. Memory grows with every new beginning: for checks with few possible tokens only.

Shapes: B = 1, T position, F features, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.drafters import HeadsDrafter
from decode.target import BaseTarget, TargetOutput


@dataclass
class _Row:
    """What the base said after some tokens; logits only once they were asked for."""

    features: Tensor
    logits: Tensor | None = None


class MemoTarget:
    """`Target` over a `BaseTarget`, which runs only over tokens that it has not seen in this order."""

    def __init__(self, inner: BaseTarget) -> None:
        self._inner = inner
        self._rows: dict[tuple[int, ...], _Row] = {}
        self._layers: tuple[int, ...] | None = None
        self._held: list[int] = []  # what the inner cache holds
        self._tokens: list[int] = []  # what this text has
        self.context_length = inner.context_length
        self.vocab_size = inner.vocab_size
        self.device = inner.device

    def start(self, feature_layers: tuple[int, ...]) -> None:
        if self._layers != feature_layers:
            self._inner.start(feature_layers)
            self._layers, self._held, self._rows = feature_layers, [], {}
        self._tokens = []

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        new: list[int] = tokens[0].tolist()
        first = len(self._tokens)
        self._tokens = self._tokens + new
        keys = [tuple(self._tokens[: first + count]) for count in range(1, len(new) + 1)]
        if not self._knows(keys, num_logits):
            self._run(keys, num_logits)
        rows = [self._rows[key] for key in keys]
        logits = [row.logits for row in rows[len(rows) - num_logits :] if row.logits is not None]
        return TargetOutput(
            torch.stack(logits)[None] if logits else torch.zeros(1, 0, self.vocab_size, device=self.device),
            torch.stack([row.features for row in rows])[None],
        )

    def _knows(self, keys: Sequence[tuple[int, ...]], num_logits: int) -> bool:
        asked = len(keys) - num_logits
        return all(
            key in self._rows and (index < asked or self._rows[key].logits is not None)
            for index, key in enumerate(keys)
        )

    def _run(self, keys: Sequence[tuple[int, ...]], num_logits: int) -> None:
        """Bring the inner cache to where the new tokens begin, or before it, and run over the rest."""
        wanted, first = keys[-1], len(keys[0]) - 1
        common = 0
        while common < min(len(self._held), first) and self._held[common] == wanted[common]:
            common += 1
        self._inner.rollback(common)
        tokens = torch.tensor([list(wanted[common:])], device=self.device)
        output = self._inner.forward(tokens, num_logits)
        self._held = list(wanted)
        for index, key in enumerate(keys):
            row = self._rows.setdefault(key, _Row(output.features[0, first - common + index]))
            if index >= len(keys) - num_logits:
                row.logits = output.logits[0, index - (len(keys) - num_logits)]

    def forward_tree(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> TargetOutput:
        raise NotImplementedError("chains only")

    def rollback(self, length: int) -> None:
        del self._tokens[length:]

    def keep(self, length: int, positions: Sequence[int]) -> None:
        raise NotImplementedError("chains only")


class MemoDrafter:
    """`Drafter` over heads, which run only for committed tokens and drafts that they have not seen."""

    def __init__(self, inner: HeadsDrafter) -> None:
        self._inner = inner
        self._logits: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self.max_draft_length = inner.max_draft_length
        self.feature_layers = inner.feature_layers
        self.draft_ids = inner.draft_ids

    def start(self, prompt: Tensor) -> None:
        self._first = prompt[:, :1]
        self._anchors: list[tuple[Tensor, Tensor]] = []
        self._committed: tuple[int, ...] = tuple(prompt[0, :1].tolist())
        self._drafts: tuple[int, ...] = ()

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        self._anchors.append((features, next_tokens))
        self._committed += tuple(next_tokens[0].tolist())
        self._drafts = ()

    def draft(self, k: int, previous: Tensor) -> Tensor:
        if k > 1:
            self._drafts += (int(previous),)
        key = (self._committed, self._drafts)
        if key not in self._logits:
            self._logits[key] = self._recompute(previous)
        return self._logits[key]

    def _recompute(self, previous: Tensor) -> Tensor:
        """Logits for the current drafts, from a state built anew."""
        self._inner.start(self._first)
        features, next_tokens = zip(*self._anchors, strict=True)
        self._inner.ingest(torch.cat(features, dim=1), torch.cat(next_tokens, dim=1))
        logits = self._inner.draft(1, self._first[:, -1])
        for k, token in enumerate(self._drafts, start=2):
            logits = self._inner.draft(k, previous.new_tensor([token]))
        return logits

    def fork(self, origins: Tensor) -> None:
        raise NotImplementedError("chains only")
