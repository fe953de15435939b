"""What a step is made of, each part measured alone: a forward of the base over a few rows, a draft, reading memory.

Knows: how to time parts in turns, behind a text and as decoding runs them; how fast this machine reads; and the
arithmetic from these to a memory floor and an expected speed-up. Refuses to know: prompts, what was accepted and why,
tables and pictures.

Shapes: n committed tokens, of which the target has seen n - 1; R rows; K drafts.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from statistics import median
from typing import Any

import torch
from torch import Tensor

from decode.chain import Drafting, draft_chain, grow_chain
from decode.pooled import grow_together
from decode.target import Target
from decode.tree_shape import TreeShape
from decode.trees import draft_tree
from mtp.base import FrozenBase

CONTEXT = 200
"""Places of the text behind which a step is measured, if the base's context has room for them."""
LEAST_ROWS = 8
"""Rows that are measured at least, if the base's context has room for them."""
ROUNDS, TREE_ROUNDS, _READ_ROUNDS = 7, 5, 12
_BUFFER, _LEAST_BUFFER = 2**29, 2**25  # bytes: far beyond the cache, and less where memory is short
_READS_IN_A_ROW = 4  # by an accelerator, which then need not be waited for in between
Clock = Callable[[], float]


@dataclass(frozen=True)
class Costs:
    """Seconds and bytes of one machine, base and heads."""

    context: int
    """Places of the text before the rows."""
    forward: list[float]
    """[R] seconds of one forward over 1, 2, …, R rows with the logits of each."""
    draft: float | None
    """Seconds of one draft, its law and the draw included; None without heads."""
    weight_bytes: int
    """What a forward has to read."""
    bandwidth: float
    """Bytes per second that this machine can read."""

    @property
    def floor(self) -> float:
        """Seconds below which no forward can be, as all weights are read."""
        return self.weight_bytes / self.bandwidth

    @property
    def achieved(self) -> float:
        """Bytes of weights per second in a forward over one row."""
        return self.weight_bytes / self.forward[0]

    def speed_up(self, shares: Sequence[float], rest: float, plain_rest: float) -> list[float]:
        """[K] what 1, 2, …, K drafts per step should make of plain decoding's speed, prompts aside.

        The first k drafts of a step are kept with chance shares[k - 1], whatever K is (nearly so with the block rule,
        which judges all K together). `rest` and `plain_rest` are the seconds of a step, with and without drafts, that
        are neither forward nor drafting; they are taken to be the same for every K.
        """
        assert self.draft is not None, "without heads there are no drafts"
        plain = self.forward[0] + plain_rest
        tokens = list(accumulate(shares, initial=1.0))[1:]  # per step
        steps = [rows + k * self.draft + rest for k, rows in enumerate(self.forward[1:], start=1)]
        return [made * plain / step for made, step in zip(tokens, steps, strict=False)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; seconds and bytes."""
        return {
            "context": self.context,
            "forward_seconds": self.forward,
            "draft_seconds": self.draft,
            "weight_bytes": self.weight_bytes,
            "read_bandwidth": self.bandwidth,
            "forward_bandwidth": self.achieved,
            "memory_floor_seconds": self.floor,
        }


@torch.inference_mode()
def measure_steps(
    target: Target,
    given: Drafting,
    following: Tensor,
    drafts: int,
    rounds: int = ROUNDS,
    clock: Clock = time.perf_counter,
) -> tuple[list[float], float | None]:
    """Seconds [R] of a forward over 1 to R rows, and of one of `drafts` drafts in a chain; medians over the rounds.

    The rows stand behind the n - 1 >= 1 tokens before the last of `given.committed`: that one, and `following` [R - 1].
    """
    past, drafter = len(given.committed) - 1, given.drafter if drafts else None
    rows = torch.cat([given.last, following])[None]
    target.start(drafter.feature_layers if drafter else ())
    output = target.forward(given.committed[None, :-1], num_logits=0)
    jobs: list[Callable[[], object]] = [
        partial(target.forward, rows[:, :width], num_logits=width) for width in range(1, rows.shape[1] + 1)
    ]
    if drafter is not None:
        drafter.start(given.committed[None])
        drafter.ingest(output.features, given.committed[None, 1:])
        jobs.append(partial(_draft, given, drafts, count(past + 1, drafts)))
    spent = in_turns(jobs, target.device, rounds, clock, before=partial(target.rollback, past))
    times = [median(one) for one in spent]
    return times[: rows.shape[1]], times[-1] / drafts if drafter is not None else None


@torch.inference_mode()
def measure_drafts_together(
    target: Target, texts: Sequence[Drafting], drafts: int, clock: Clock = time.perf_counter
) -> float:
    """Seconds of one draft of one text, where so many draft at once. All texts are that of the first."""
    drafters = {index: text.drafter for index, text in enumerate(texts)}
    committed = texts[0].committed
    assert texts[0].drafter is not None, "without heads there are no drafts"
    target.start(texts[0].drafter.feature_layers)
    features = target.forward(committed[None, :-1], num_logits=0).features
    for drafter in filter(None, drafters.values()):
        drafter.start(committed[None])
        drafter.ingest(features, committed[None, 1:])

    def draft() -> object:
        return grow_together({index: grow_chain(text, drafts) for index, text in enumerate(texts)}, drafters)

    [spent] = in_turns([draft], target.device, TREE_ROUNDS, clock)
    return median(spent) / (drafts * len(texts))


@torch.inference_mode()
def measure_trees(
    target: Target, given: Drafting, shape: TreeShape, most: int, clock: Clock = time.perf_counter
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds [most + 1] of a forward over a tree of 0 to `most` levels, and of drafting it; medians."""
    past, drafter = len(given.committed) - 1, given.drafter
    assert drafter is not None, "without heads there are no drafts"
    target.start(drafter.feature_layers)
    output = target.forward(given.committed[None, :-1], num_logits=0)
    drafter.start(given.committed[None])
    drafter.ingest(output.features, given.committed[None, 1:])
    levels = range(1, most + 1)
    trees = [draft_tree(given, shape, level) for level in levels]
    jobs: list[Callable[[], object]] = [partial(target.forward, given.last[None], num_logits=1)]
    jobs += [partial(tree.forward, target) for tree in trees]
    jobs += [partial(draft_tree, given, shape, level) for level in levels]
    spent = in_turns(jobs, target.device, TREE_ROUNDS, clock, before=partial(target.rollback, past))
    times = [median(one) for one in spent]
    return tuple(times[: most + 1]), (0.0, *times[most + 1 :])


def _draft(given: Drafting, drafts: int, places: "count[int]") -> None:
    given.random.seek(next(places))  # elsewhere each time: keyed draws of a place are kept
    draft_chain(given, drafts)


def read_bandwidth(
    device: torch.device, size: int = _BUFFER, rounds: int = _READ_ROUNDS, clock: Clock = time.perf_counter
) -> float:
    """Bytes per second of reading `size` bytes, all threads, the best of several rounds."""
    buffer, reads = _buffer(device, size), 1 if device.type == "cpu" else _READS_IN_A_ROW

    def read() -> None:
        for _ in range(reads):
            buffer.sum()

    [spent] = in_turns([read], device, rounds, clock)
    return reads * buffer.nbytes / max(min(spent), 1e-9)


def _buffer(device: torch.device, size: int) -> Tensor:
    """Written to, as pages that never were may all be one. Smaller where there is no room for it."""
    try:
        return torch.ones(size // 4, dtype=torch.float32, device=device)
    except RuntimeError:
        if size <= _LEAST_BUFFER:
            raise
        return _buffer(device, size // 2)


def in_turns(
    jobs: Sequence[Callable[[], object]],
    device: torch.device,
    rounds: int,
    clock: Clock = time.perf_counter,
    before: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds [jobs, rounds] of each job in each round. Who begins changes from round to round; a round before all is
    not counted, and `before`, called before each job, is not timed."""
    spent: list[list[float]] = [[] for _ in jobs]
    for turn in range(-1, rounds):
        for place in range(len(jobs)):
            index = (place + turn) % len(jobs)
            before()
            _wait(device)
            started = clock()
            jobs[index]()
            _wait(device)
            if turn >= 0:
                spent[index].append(clock() - started)
    return spent


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def weight_bytes(base: FrozenBase) -> int:
    """Bytes of the decoder layers and the output matrix: what a forward over a row of a dense base reads."""
    return sum(map(_bytes, [*base.layers.parameters(), base.output_matrix]))


def _bytes(weight: Tensor) -> int:
    """A quantised matrix consists of several tensors."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    parts: list[str] = weight.__tensor_flatten__()[0]
    return sum(_bytes(getattr(weight, part)) for part in parts)
