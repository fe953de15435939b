"""How many tokens a second the batch loop writes, against `generate()` of transformers on the same prompts.

Knows: how to run both fairly: the same prompts, limit, temperature and truncations (none), taking turns; only tokens up
to the end of an answer count, and everything from ids to ids is timed.
Refuses to know: where prompts come from, and how a result is shown.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from decode.batch import Task, decode_many
from decode.rivals import generate_batch
from mtp.base import FrozenBase

GENERATE_BATCH = 32


@dataclass(frozen=True)
class Round:
    """Tokens per second of one turn each, and the tokens they wrote."""

    rate: float
    generate_rate: float
    tokens: int
    generate_tokens: int


@dataclass(frozen=True)
class Comparison:
    """All rounds; the medians over them. The ratio is the median of the rounds' own ratios."""

    rounds: list[Round]

    @property
    def rate(self) -> float:
        return median(r.rate for r in self.rounds)

    @property
    def generate_rate(self) -> float:
        return median(r.generate_rate for r in self.rounds)

    @property
    def ratio(self) -> float:
        return median(r.rate / r.generate_rate for r in self.rounds)


def compare(
    base: FrozenBase, tasks: Sequence[Task], ordered: Sequence[Task], *, max_new_tokens: int, slots: int, rounds: int
) -> Iterator[Round]:
    """Answer all tasks by both, `rounds` times; tasks are of one temperature. Who begins changes by turns.

    `ordered` are the same tasks in the order in which the batch loop is given them.
    """
    assert len({task.temperature for task in tasks}) == 1
    for number in range(rounds):
        timed: dict[bool, tuple[float, int]] = {}
        for ours in (True, False) if number % 2 == 0 else (False, True):
            started = time.perf_counter()
            if ours:
                steps = decode_many(base, ordered, max_new_tokens=max_new_tokens, slots=slots)
                tokens = sum(step.tokens for step in steps)
            else:
                tokens = sum(map(len, generate_all(base, tasks, max_new_tokens, seed=number)))
            timed[ours] = tokens / (time.perf_counter() - started), tokens
        yield Round(timed[True][0], timed[False][0], timed[True][1], timed[False][1])


def generate_all(base: FrozenBase, tasks: Sequence[Task], max_new_tokens: int, seed: int) -> list[list[int]]:
    """The ids of each answer by `generate()`, in left-padded batches, with the end-of-sequence token if it came."""
    temperature = tasks[0].temperature
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    choices = drawn if temperature > 0 else {"do_sample": False}
    answers: list[list[int]] = []
    for start in range(0, len(tasks), GENERATE_BATCH):
        prompts = [task.ids for task in tasks[start : start + GENERATE_BATCH]]
        answers += generate_batch(base, prompts, max_new_tokens, choices, seed + start)
    return answers
