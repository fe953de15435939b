"""What a decoding run counts: committed tokens, accepted drafts, analytic acceptance and seconds.

Knows: numbers of one or several texts. Refuses to count what nobody sees: drafts and tokens that a stop rule discarded
from a block are left out, so `committed` is the length of the output.

Shapes: K draft position.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Phase = Literal["prefill", "draft", "verify", "other"]


def _phases() -> dict[Phase, float]:
    return {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "other": 0.0}


@dataclass
class DecodeStats:
    """Counts of one text; `merge` adds those of another with the same settings."""

    rule: str
    """The rule that really judged the drafts."""
    draft_length: int
    """K that was asked for; a step near the end of a text may draft fewer."""
    steps: int = 0
    """Base forwards after the prefill."""
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    """[K] steps that drafted position k."""
    accepted_at: list[int] = field(default_factory=list)
    """[K] steps that accepted position k, hence all before it."""
    reached_at: list[int] = field(default_factory=list)
    """[K] steps that drafted position k and accepted all before it."""
    alpha_sum: list[float] = field(default_factory=list)
    """[K] sum over the reached of sum_x min(p, q)."""
    histogram: list[int] = field(default_factory=list)
    """[K + 1] how many steps committed 1, 2, …, K + 1 tokens."""
    residual_empty: int = 0
    """Steps whose residual had no mass and fell back to p."""
    nonfinite_drafts: int = 0
    """Steps whose drafts were cut short by a row of q that was NaN or infinite."""
    seconds: dict[Phase, float] = field(default_factory=_phases)

    def __post_init__(self) -> None:
        for name in ("drafted_at", "accepted_at", "reached_at"):
            if not getattr(self, name):
                setattr(self, name, [0] * self.draft_length)
        self.alpha_sum = self.alpha_sum or [0.0] * self.draft_length
        self.histogram = self.histogram or [0] * (self.draft_length + 1)

    def record(self, drafted: int, accepted: int, committed: int, overlap: Sequence[float]) -> None:
        """Count one step: what was drafted, how many of those stayed, how many tokens the stop rules let through, and
        sum_x min(p, q) of each draft. A discarded tail takes its drafts out of every count."""
        if committed < accepted + 1:  # the stop rules cut the block: what follows was never part of the text
            drafted = accepted = min(accepted, committed)
        self.steps += 1
        self.committed += committed
        self.drafted += drafted
        self.accepted += accepted
        self.histogram[committed - 1] += 1
        for index in range(drafted):
            self.drafted_at[index] += 1
            self.accepted_at[index] += index < accepted
            if index <= accepted:
                self.reached_at[index] += 1
                self.alpha_sum[index] += overlap[index]

    def merge(self, other: "DecodeStats") -> None:
        """Add the counts of another text decoded with the same draft length."""
        assert other.draft_length == self.draft_length, (other.draft_length, self.draft_length)
        for name in ("steps", "committed", "drafted", "accepted", "residual_empty", "nonfinite_drafts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_at", "accepted_at", "reached_at", "alpha_sum", "histogram"):
            setattr(self, name, [a + b for a, b in zip(getattr(self, name), getattr(other, name), strict=True)])
        for phase, spent in other.seconds.items():
            self.seconds[phase] += spent

    @property
    def accept_len(self) -> float:
        """tau: committed tokens per step, including the recovered or bonus token; plain decoding is 1."""
        return self.committed / max(1, self.steps)

    @property
    def accepted_per_position(self) -> list[float]:
        """[K] share of the steps that drafted position k in which it (and all before it) was accepted."""
        return _shares(self.accepted_at, self.drafted_at)

    @property
    def alpha(self) -> list[float]:
        """[K] sum_x min(p, q) at position k, averaged over the steps that drafted it and accepted all before it."""
        return _shares(self.alpha_sum, self.reached_at)

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        counts = ("steps", "committed", "drafted", "accepted", "histogram", "residual_empty", "nonfinite_drafts")
        return {
            "verify": self.rule,
            "draft_length": self.draft_length,
            "accept_len": self.accept_len,
            **{name: getattr(self, name) for name in counts},
            "accepted_per_position": self.accepted_per_position,
            "alpha": self.alpha,
            "seconds": dict(self.seconds),
        }


def _shares(parts: Sequence[float], wholes: Sequence[int]) -> list[float]:
    return [part / whole if whole else 0.0 for part, whole in zip(parts, wholes, strict=True)]


class Stopwatch:
    """Adds wall seconds to the phases of a DecodeStats; waits for an accelerator, so that a phase pays its own work."""

    def __init__(self, stats: DecodeStats, device: torch.device) -> None:
        self._seconds = stats.seconds
        self._device = device

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._seconds[name] += time.perf_counter() - started
