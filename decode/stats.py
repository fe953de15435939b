"""What a decoding run counts: committed tokens, accepted drafts, analytic acceptance and seconds.

Knows: numbers of one or several texts. Refuses to count what nobody sees: drafts and tokens that a stop rule discarded
from a block are left out, so `committed` is the length of the output.

Shapes: K draft position, of which there are `most_drafts`.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Phase = Literal["prefill", "draft", "verify", "rule", "other"]


LOOKUP_COUNTS = ("lookup_steps", "lookup_drafted", "lookup_accepted")
_FAULTS = ("residual_empty", "unusable_q", "undrafted_texts")


def _phases() -> dict[Phase, float]:
    """Seconds of the prompt, drafting, the base's forward over the drafts, processors and acceptance rule, the rest."""
    return {"prefill": 0.0, "draft": 0.0, "verify": 0.0, "rule": 0.0, "other": 0.0}


@dataclass
class DecodeStats:
    """Counts of one text; `merge` adds those of another with the same settings."""

    rule: str
    """The rule that really judged the drafts; the name of a lossy one begins with `lossy`."""
    draft_length: int
    """K that was asked for, or the depth of the tree; a step near the end of a text may draft fewer."""
    tree: str | None = None
    """The shape of the tree, if several drafts stood at one position."""
    lookup: int = 0
    """Most drafts of a step that are copied from the text. May exceed `draft_length`, which is what heads draft."""
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
    lookup_steps: int = 0
    """Steps whose drafts were copied from the text. They and their drafts are among those counted above."""
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    residual_empty: int = 0
    """Steps whose residual had no mass and fell back to p."""
    unusable_q: int = 0
    """Steps that drafted less because q was NaN, infinite, or had no token left after the processors."""
    undrafted_texts: int = 0
    """Texts decoded without drafts because a processor of the request may keep state."""
    seconds: dict[Phase, float] = field(default_factory=_phases)

    def __post_init__(self) -> None:
        for name in ("drafted_at", "accepted_at", "reached_at"):
            if not getattr(self, name):
                setattr(self, name, [0] * self.most_drafts)
        self.alpha_sum = self.alpha_sum or [0.0] * self.most_drafts
        self.histogram = self.histogram or [0] * (self.most_drafts + 1)

    @property
    def most_drafts(self) -> int:
        """How many positions a step drafts at most, whoever does it."""
        return max(self.draft_length, self.lookup)

    def record(
        self,
        drafted: int,
        accepted: int,
        committed: int,
        overlap: Sequence[float],
        nodes: int | None = None,
        copied: bool = False,
    ) -> None:
        """Count one step: how many positions were drafted, how many of those stayed, how many tokens the stop rules let
        through, and sum_x min(p, q) of each position. `nodes` is how many drafts a tree had at these positions;
        `copied` says that they came from the text. A discarded tail takes its drafts out of every count."""
        nodes = drafted if nodes is None else nodes
        if committed < accepted + 1:  # the stop rules cut the block: what follows was never part of the text
            drafted = accepted = nodes = min(accepted, committed)
        self.steps += 1
        self.committed += committed
        self.drafted += nodes
        self.accepted += accepted
        if copied:
            self.lookup_steps += 1
            self.lookup_drafted += drafted
            self.lookup_accepted += accepted
        self.histogram[committed - 1] += 1
        for index in range(drafted):
            self.drafted_at[index] += 1
            self.accepted_at[index] += index < accepted
            if index <= accepted:
                self.reached_at[index] += 1
                self.alpha_sum[index] += overlap[index]

    def empty(self) -> "DecodeStats":
        """Counters at zero for more texts of the same settings."""
        return DecodeStats(self.rule, self.draft_length, self.tree, self.lookup)

    def merge(self, other: "DecodeStats") -> None:
        """Add the counts of another text decoded with the same draft length and lookup."""
        lengths = (self.draft_length, self.lookup), (other.draft_length, other.lookup)
        assert lengths[0] == lengths[1], lengths
        for name in ("steps", "committed", "drafted", "accepted", *LOOKUP_COUNTS, *_FAULTS):
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
    def lossless(self) -> bool:
        """Whether the rule keeps the law of p."""
        return not self.rule.startswith("lossy")

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        counts = ("steps", "committed", "drafted", "accepted", "histogram", *LOOKUP_COUNTS, *_FAULTS)
        return {
            "verify": self.rule,
            "lossless": self.lossless,
            "tree": self.tree,
            "draft_length": self.draft_length,
            "lookup": self.lookup,
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
