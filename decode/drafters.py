"""Sources of q: whatever proposes the next tokens of a text, one draft position at a time.

Knows: what a drafter must remember between steps. Refuses to turn logits into probabilities or to draw tokens; the
engine does both, so that base and drafter share one road.

Shapes: B batch, T position, F features, Vd draft vocabulary.
"""

from typing import Protocol

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

    def fork(self, origins: Tensor) -> None:
        assert self._state is not None, "start() was not called"
        self._branches = self.heads.fork(self._branches or self._state, origins)
