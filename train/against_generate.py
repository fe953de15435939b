"""How many tokens a second the batch loop writes, against `generate()` of transformers on the same prompts.

Knows: how to run both fairly: the same prompts, limit, temperature and truncations (none), taking turns; only tokens up
to the end of an answer count, and everything from ids to ids is timed.
Refuses to know: where prompts come from, and how a result is shown.
Shapes: B batch, T tokens of the longest prompt in a batch.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import GenerationConfig

from decode.batch import Task, decode_many
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
    answers: list[list[int]] = []
    for start in range(0, len(tasks), GENERATE_BATCH):
        answers += _generate(base, tasks[start : start + GENERATE_BATCH], max_new_tokens, seed + start)
    return answers


def _generate(base: FrozenBase, tasks: Sequence[Task], max_new_tokens: int, seed: int) -> list[list[int]]:
    pad_id = base.tokenizer.pad_token_id
    pad_id = (*base.eos_token_ids, 0)[0] if pad_id is None else pad_id
    tokens_BT = torch.full((len(tasks), max(len(task.ids) for task in tasks)), pad_id, dtype=torch.long)
    mask_BT = torch.zeros_like(tokens_BT)
    for i, task in enumerate(tasks):
        tokens_BT[i, -len(task.ids) :] = torch.tensor(task.ids)
        mask_BT[i, -len(task.ids) :] = 1
    drawn = {"do_sample": True, "temperature": tasks[0].temperature, "top_k": 0, "top_p": 1.0}
    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=list(base.eos_token_ids) or None,
        pad_token_id=pad_id,
        **(drawn if tasks[0].temperature > 0 else {"do_sample": False}),
    )
    devices = [base.device] if base.device.type == "cuda" else []
    with _without_generation_defaults(base.model), torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        out = base.model.generate(
            tokens_BT.to(base.device), attention_mask=mask_BT.to(base.device), generation_config=config
        )
    rows: list[list[int]] = out[:, tokens_BT.shape[1] :].tolist()
    return [_until_end(row, base.eos_token_ids) for row in rows]


def _until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    place = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return ids[: place + 1]


@contextmanager
def _without_generation_defaults(model: Any) -> Iterator[None]:
    """`generate()` fills what a call leaves open from the model's own defaults, such as a repetition penalty."""
    kept, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept
