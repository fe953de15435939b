"""The sides of a comparison of speed: what each has decoded, in which time, and their turns.

Knows: tokens and seconds of every prompt, and what of our engine's time is the base's forward. Refuses to know: how a
side decodes, and where and with which settings.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from decode.costs import Clock
from decode.stats import LOOKUP_COUNTS, DecodeStats, Phase

Runner = Callable[[list[int], int], tuple[int, DecodeStats | None]]
"""(prompt ids, max_new_tokens) to the number of generated tokens and, from our engine, its statistics."""
_LEAST_SECONDS = 1e-9  # for divisions


@dataclass
class Side:
    """One way to decode, and what it has done so far."""

    name: str
    run: Runner
    clock: Clock = time.perf_counter
    turns: list[tuple[int, float]] = field(default_factory=list)
    """Generated tokens and wall seconds of each prompt."""
    stats: DecodeStats | None = None
    by_category: dict[str, DecodeStats] = field(default_factory=dict)

    def measure(self, ids: list[int], max_new_tokens: int, category: str | None = None) -> None:
        started = self.clock()
        tokens, stats = self.run(ids, max_new_tokens)  # ends with the ids on the CPU, hence after the device
        self.turns.append((tokens, self.clock() - started))
        if stats is None:
            return
        self.stats = self.stats or stats.empty()
        self.stats.merge(stats)
        if category is not None:
            self.by_category.setdefault(category, stats.empty()).merge(stats)

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
        """The same for each prompt."""
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
        return report | {"tok_per_s_by_prompt": self.rates, "tokens": self.tokens, "wall_seconds": self.wall}


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


def take_turns(
    sides: list[Side],
    prompts: Sequence[list[int]],
    budgets: Sequence[int],
    categories: Sequence[str | None],
    on_prompt: Callable[[], None] = lambda: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Every side on every prompt, one prompt after the other: what slows the machine down for a while hits them all.
    Ends early behind a prompt after which `stop` is true."""
    for index, (ids, budget, category) in enumerate(zip(prompts, budgets, categories, strict=True)):
        turn = index % len(sides)  # nobody is always first
        for side in sides[turn:] + sides[:turn]:
            side.measure(ids, budget, category)
        on_prompt()
        if stop():
            return


def paired(ours: Side, other: Side) -> list[float]:
    """Our tokens per second over the other side's, prompt by prompt."""
    return [mine / theirs if theirs else 0.0 for mine, theirs in zip(ours.rates, other.rates, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": median(values), "min": min(values), "max": max(values)}
