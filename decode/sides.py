"""The sides of a comparison of speed: what each has decoded, in which time, and their turns.

Knows: tokens and seconds of every turn, which is a prompt or a batch of them, and what of our engine's time is the
base's forward. Refuses to know: how a side decodes, and where and with which settings.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from decode.costs import Clock
from decode.stats import LOOKUP_COUNTS, DecodeStats, Phase


@dataclass(frozen=True)
class Trial:
    """A prompt to decode."""

    ids: list[int]
    max_new_tokens: int
    category: str | None = None


Runner = Callable[[Sequence[Trial]], tuple[int, Sequence[DecodeStats]]]
"""Decodes the prompts of a turn; the number of generated tokens and, from our engine, the statistics of each text."""
_LEAST_SECONDS = 1e-9  # for divisions


@dataclass
class Side:
    """One way to decode, and what it has done so far."""

    name: str
    run: Runner
    clock: Clock = time.perf_counter
    turns: list[tuple[int, float]] = field(default_factory=list)
    """Generated tokens and wall seconds of each turn."""
    stats: DecodeStats | None = None
    by_category: dict[str, DecodeStats] = field(default_factory=dict)

    def measure(self, trials: Sequence[Trial]) -> None:
        started = self.clock()
        tokens, stats = self.run(trials)  # ends with the ids on the CPU, hence after the device
        self.turns.append((tokens, self.clock() - started))
        for trial, one in zip(trials, stats, strict=False):  # other engines tell none
            self.stats = self.stats or one.empty()
            self.stats.merge(one)
            if trial.category is not None:
                self.by_category.setdefault(trial.category, one.empty()).merge(one)

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.turns)

    @property
    def wall(self) -> float:
        return sum(seconds for _, seconds in self.turns)

    @property
    def tok_per_s(self) -> float:
        """Generated tokens per wall second, prefill included."""
        return self.tokens / max(self.wall, _LEAST_SECONDS)

    @property
    def rates(self) -> list[float]:
        """The same for each turn."""
        return [tokens / max(seconds, _LEAST_SECONDS) for tokens, seconds in self.turns]

    def to_json(self) -> dict[str, Any]:
        report: dict[str, Any] = {"name": self.name}
        if self.stats:
            spent = Spent.by(self)
            report |= {
                "accept_len": self.stats.accept_len,
                "steps": self.stats.steps,
                "accepted_per_position": self.stats.accepted_per_position,
                "alpha": self.stats.alpha,
                "seconds": spent.seconds,
                "step_seconds": spent.step,
                "rule_share": spent.share("rule"),
                "overhead_share": spent.share("draft", "rule", "other"),
            }
            if self.stats.lookup:
                report |= {name: getattr(self.stats, name) for name in LOOKUP_COUNTS}
        if self.by_category:
            lengths = {name: stats.accept_len for name, stats in sorted(self.by_category.items())}
            report |= {"accept_len_by_category": lengths, "accept_len_category_mean": fmean(lengths.values())}
        report |= {"tok_per_s": self.tok_per_s, "tok_per_s_spread": spread(self.rates)}
        return report | {"tok_per_s_by_turn": self.rates, "tokens": self.tokens, "wall_seconds": self.wall}


@dataclass(frozen=True)
class Spent:
    """Where the wall time of a side of our engine went."""

    seconds: dict[Phase, float]
    steps: int

    @classmethod
    def by(cls, side: Side) -> "Spent":
        """What the engine's phases do not account for is `other`."""
        assert side.stats is not None, f"{side.name} is not of our engine"
        seconds = dict(side.stats.seconds)
        seconds["other"] = side.wall - sum(spent for phase, spent in seconds.items() if phase != "other")
        return cls(seconds, max(1, side.stats.steps))

    @property
    def stepping(self) -> float:
        """Seconds of all steps: everything but the prompts."""
        return max(sum(self.seconds.values()) - self.seconds["prefill"], _LEAST_SECONDS)

    @property
    def step(self) -> float:
        return self.stepping / self.steps

    @property
    def rest(self) -> float:
        """Seconds of a step that are neither drafting nor the base's forward."""
        return (self.seconds["rule"] + self.seconds["other"]) / self.steps

    def share(self, *phases: Phase) -> float:
        """Of all steps."""
        return sum(self.seconds[phase] for phase in phases) / self.stepping


def in_turns(trials: Sequence[Trial], batch_size: int) -> list[Sequence[Trial]]:
    """As many prompts to a turn as are decoded at a time."""
    return [trials[first : first + batch_size] for first in range(0, len(trials), batch_size)]


def take_turns(
    sides: list[Side],
    turns: Sequence[Sequence[Trial]],
    on_prompt: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Every side on every turn, one turn after the other: what slows the machine down for a while hits them all. Ends
    early behind a turn after which `stop` is true; returns how many prompts were decoded."""
    done = 0
    for index, trials in enumerate(turns):
        first = index % len(sides)  # nobody is always first
        for side in sides[first:] + sides[:first]:
            side.measure(trials)
        for _ in trials:
            done += 1
            on_prompt()
        if stop():
            break
    return done


def paired(ours: Side, other: Side) -> list[float]:
    """Our tokens per second over the other side's, turn by turn."""
    return [mine / theirs if theirs else 0.0 for mine, theirs in zip(ours.rates, other.rates, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": median(values), "min": min(values), "max": max(values)}
