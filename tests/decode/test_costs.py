"""What a step is made of: timed in turns by a clock of our own, behind the same text, and the arithmetic on top."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode import costs as module
from decode.chain import Drafting
from decode.costs import Costs, in_turns, measure_steps, measure_trees, read_bandwidth, weight_bytes
from decode.laws import Laws
from decode.request import Request
from decode.target import TargetOutput
from decode.tree_shape import TreeShape
from mtp.keyed import KeyedSource
from mtp.sampling import RandomSource
from tests.decode.toys import TableDrafter, TableTarget, table
from tests.tiny import tiny_base

CPU = torch.device("cpu")


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_jobs_take_turns_and_the_first_round_does_not_count() -> None:
    clock, done = Clock(), []

    def job(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            done.append(name)
            clock.passes(seconds if len(done) > 3 else 100.0)  # cold

        return run

    jobs = [job("a", 1.0), job("b", 2.0), job("c", 4.0)]
    spent = in_turns(jobs, CPU, 3, clock, before=lambda: clock.passes(1000.0))
    assert spent == [[1.0] * 3, [2.0] * 3, [4.0] * 3]
    assert "".join(done[3:]) == "abc" + "bca" + "cab"  # nobody is always first
    assert sorted(done[:3]) == ["a", "b", "c"]


class TimedTarget(TableTarget):
    """A forward takes 10 seconds and one for each row."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(table(0))
        self.clock = clock
        self.before: list[int] = []

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        self.before.append(len(self.tokens))
        self.clock.passes(10.0 + tokens.shape[1])
        return super().forward(tokens, num_logits)

    def forward_tree(self, tokens: Tensor, visible: Tensor, depths: Tensor) -> TargetOutput:
        self.clock.passes(10.0 + tokens.shape[1])
        return super().forward_tree(tokens, visible, depths)


class TimedDrafter(TableDrafter):
    """A draft takes 3 seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(table(1), max_draft_length=2)
        self.clock = clock
        self.asked: list[int] = []

    def draft(self, k: int, previous: Tensor) -> Tensor:
        if k == 1:
            self.drafts = [[]]
        self.asked.append(k)
        self.clock.passes(3.0)
        return super().draft(k, previous)


@pytest.mark.parametrize("drafts", [2, 0])
def test_forwards_and_drafts_are_measured_behind_the_same_text(drafts: int) -> None:
    clock = Clock()
    target, drafter = TimedTarget(clock), TimedDrafter(clock)
    committed, request = torch.tensor([0, 1, 2, 1]), Request(temperature=1.0)
    given = Drafting(drafter, committed, Laws(request, None, None), 3, request, RandomSource(0))
    forward, draft = measure_steps(target, given, torch.tensor([0, 2]), drafts, rounds=3, clock=clock)
    assert forward == [11.0, 12.0, 13.0]
    assert draft == (3.0 if drafts else None)
    assert target.before == [0] + [3] * 3 * 4  # all but the last committed token, then always behind these
    assert drafter.asked == [1, 2] * (4 if drafts else 0)


def test_trees_are_measured_level_by_level() -> None:
    """A forward takes 10 and 1 for each row, a level of drafts 3."""
    clock = Clock()
    target, drafter = TimedTarget(clock), TimedDrafter(clock)
    committed, request = torch.tensor([0, 1, 2, 1]), Request(temperature=1.0)
    given = Drafting(drafter, committed, Laws(request, None, None), 3, request, RandomSource(0))
    forward, draft = measure_trees(target, given, TreeShape.parse("2,1"), 2, clock=clock)
    assert forward == (11.0, 13.0, 15.0)
    assert draft == (0.0, 3.0, 6.0)


def test_keyed_draws_are_made_anew_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept by place; a draft that finds them ready would look cheaper than it is."""
    made: list[tuple[int, int]] = []
    real = KeyedSource._vectors

    def counted(self: KeyedSource, text: int, count: int, vocab_size: int) -> Tensor:
        made.append((self._positions[text], count))
        assert (7, self._positions[text]) not in self._noise
        return real(self, text, count, vocab_size)

    monkeypatch.setattr(KeyedSource, "_vectors", counted)
    request = Request(temperature=1.0, reproducible=True, seed=7)
    drafter = TableDrafter(table(1), max_draft_length=2)
    drafter.draft = lambda k, previous: drafter.logits[0, 0][None]  # type: ignore[method-assign]
    given = Drafting(drafter, torch.tensor([0, 1]), Laws(request, None, None), 3, request, KeyedSource(7))
    measure_steps(TableTarget(table(0)), given, torch.tensor([2]), 2, rounds=3)
    assert len({place for place, _ in made}) == len(made) == 2 * 4


def test_bandwidth_is_that_of_the_best_round() -> None:
    ticks = iter([0.0, 5.0, 10.0, 14.0, 20.0, 22.0])
    clock = itertools.chain([0.0], ticks).__next__  # the first round is not counted, and asked for its start only
    assert read_bandwidth(CPU, size=4096, rounds=3, clock=clock) == 4096 / 2.0


def test_a_buffer_that_does_not_fit_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch.ones, []

    def ones(count: int, **options: object) -> Tensor:
        asked.append(count * 4)
        if count * 4 > 2**26:
            raise torch.OutOfMemoryError("no room")
        return real(count, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "ones", ones)
    assert module._buffer(CPU, 2**28).nbytes == 2**26
    assert asked == [2**28, 2**27, 2**26]
    monkeypatch.setattr(module, "_LEAST_BUFFER", 2**27)
    with pytest.raises(torch.OutOfMemoryError):
        module._buffer(CPU, 2**28)


def test_what_a_forward_reads_is_layers_and_output_matrix(tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    embedding, norm = base.embedding.numel(), 32
    total = sum(parameter.numel() for parameter in base.model.parameters())
    assert weight_bytes(base) == 4 * (total - embedding - norm)
    tied = tiny_base("qwen2", tmp_path)  # here the embedding is the output matrix
    assert weight_bytes(tied) == 4 * (sum(parameter.numel() for parameter in tied.model.parameters()) - norm)
    base.model.bfloat16()
    assert weight_bytes(base) == 2 * (total - embedding - norm)


COSTS = Costs(context=200, forward=[0.5, 0.6, 0.8], draft=0.1, weight_bytes=1000, bandwidth=4000.0)


def test_floor_and_bandwidth() -> None:
    report = COSTS.to_json()
    assert report["memory_floor_seconds"] == COSTS.floor == 0.25
    assert report["forward_bandwidth"] == COSTS.achieved == 2000.0
    assert set(report) == {
        "context", "forward_seconds", "draft_seconds", "weight_bytes", "read_bandwidth", "forward_bandwidth",
        "memory_floor_seconds",
    }  # fmt: skip


def test_the_speed_up_to_expect() -> None:
    """K = 1: 1.5 tokens in 0.6 + 0.1 + 0.1 s; K = 2: 1.75 in 0.8 + 0.2 + 0.1 s; plain: one in 0.5 + 0.05 s."""
    found = COSTS.speed_up([0.5, 0.25], rest=0.1, plain_rest=0.05)
    assert found == pytest.approx([1.5 * 0.55 / 0.8, 1.75 * 0.55 / 1.1])
    assert COSTS.speed_up([0.5, 0.25, 0.1], 0.1, 0.05) == pytest.approx(found)  # four rows were not measured
    free = replace(COSTS, forward=[0.5] * 3, draft=0.0)
    assert free.speed_up([1.0, 1.0], 0.0, 0.0) == pytest.approx([2.0, 3.0])
