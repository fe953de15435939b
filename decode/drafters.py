"""Sources of q: whatever proposes the next tokens of a text, one draft position at a time.

Knows: what a drafter must remember between steps. Refuses to turn logits into probabilities or to draw tokens; the
engine does both, so that base and drafter share one road.

Shapes: B batch, T position, F features, Vd draft vocabulary.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from mtp.heads import Heads, State


class Drafter(Protocol):
    """q. Anchors are ingested once each, in order; drafts never change what was ingested."""

    @property
    def max_draft_length(self) -> int:
        """The largest K it can draft."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The base's hidden states that `ingest` needs."""

    @property
    def draft_ids(self) -> Tensor | None:
        """Base ids [Vd] of what it can propose; None is the whole vocabulary."""

    def start(self, prompt: Tensor) -> None:
        """Begin a new text, prompt [B, T]. Its anchors still come through `ingest`."""

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        """Take in verified anchors: features [B, T, F] and the token after each, [B, T]. Forgets all drafts."""

    def draft(self, k: int, previous: Tensor) -> Tensor:
        """Logits [B, Vd] of draft position k = 1, 2, …; `previous` [B] is the token before it."""

    def fork(self, origins: Tensor) -> None:
        """For trees: row i of the next `draft` goes on from row origins[i] [M] of the latest, until `ingest` or a first
        draft."""


class HeadsDrafter:
    """Trained heads as a drafter. The heads must be bound to the base already."""

    def __init__(self, heads: Heads) -> None:
        self.heads = heads
        self._state: State | None = None
        self._branches: State | None = None

    @property
    def max_draft_length(self) -> int:
        return self.heads.config.draft_length

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return tuple(self.heads.config.feature_layers)

    @property
    def draft_ids(self) -> Tensor | None:
        return self.heads.draft_ids

    def start(self, prompt: Tensor) -> None:
        self._state = self.heads.new_state(prompt.shape[0])
        self._branches = None

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        assert self._state is not None, "start() was not called"
        self._branches = None
        self.heads.ingest(self._state, features, next_tokens)

    def draft(self, k: int, previous: Tensor) -> Tensor:
        assert self._state is not None, "start() was not called"
        if k == 1:
            self._branches = None
        return self.heads.draft(self._branches or self._state, k, previous)

    def branch(self) -> State:
        """What a first draft goes on from."""
        assert self._state is not None, "start() was not called"
        self._branches = None
        return self._state

    def fork(self, origins: Tensor) -> None:
        assert self._state is not None, "start() was not called"
        self._branches = self.heads.fork(self._branches or self._state, origins)


def ingest_together(texts: Sequence[tuple[Drafter, Tensor, Tensor]]) -> None:
    """`ingest` for the drafters of several texts, at once where they are the same heads."""
    states = _states([drafter for drafter, _, _ in texts])
    if states is None:
        for drafter, features, tokens in texts:
            drafter.ingest(features, tokens)
        return
    heads, all_states = states
    heads.ingest_several(all_states, [features for _, features, _ in texts], [tokens for _, _, tokens in texts])


def draft_together(texts: Sequence[tuple[Drafter, int, Tensor]]) -> list[Tensor]:
    """`draft` for the drafters of several texts, whose k are equal; at once where they are the same heads."""
    states = _states([drafter for drafter, _, _ in texts])
    if states is None:
        return [drafter.draft(k, previous) for drafter, k, previous in texts]
    heads, all_states = states
    k = texts[0][1]
    assert all(one == k for _, one, _ in texts)
    logits = heads.draft_several(all_states, k, torch.cat([previous for _, _, previous in texts]))
    return list(torch.split(logits, 1))


def _states(drafters: Sequence[Drafter]) -> tuple[Heads, list[State]] | None:
    """The heads that all of these are, and what each has of its text; None where they are not the same."""
    same = [one for one in drafters if isinstance(one, HeadsDrafter)]
    if len(drafters) < 2 or len(same) < len(drafters) or any(one.heads is not same[0].heads for one in same):
        return None
    return same[0].heads, [one.branch() for one in same]
