"""`--draft-length auto`: K follows costs and recent acceptance, heads stay in sync, and the law stays p."""

from pathlib import Path

import pytest
import torch

from decode import Decoder
from decode.cli import main
from decode.draft_length import GUESS, DraftLengths, StepCosts
from decode.drafters import HeadsDrafter
from decode.engine import Engine
from decode.request import Request
from decode.target import BaseTarget
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from tests.decode.toys import decode
from tests.tiny import tiny_base

FLAT = StepCosts(verify=(1.0, 1.0, 1.0, 1.0), draft=(0.0, 0.1, 0.2, 0.3))
STEEP = StepCosts(verify=(1.0, 2.0, 3.0, 4.0), draft=(0.0, 1.0, 2.0, 3.0))


def after(costs: StepCosts, steps: list[tuple[int, int]]) -> DraftLengths:
    lengths = DraftLengths(costs)
    for step in steps:
        lengths.learn(*step)
    return lengths


@pytest.mark.parametrize(
    ("costs", "steps", "chosen"),
    [
        (FLAT, [(3, 3)] * 40, 3),
        (FLAT, [(3, 1)] * 40, 1),
        (FLAT, [(3, 0)] * 200, 0),
        (STEEP, [(3, 3)] * 40, 0),
        (FLAT, [(3, 3)] * 400 + [(3, 0)] * 200, 0),  # what was long ago does not count
    ],
)
def test_the_best_rate_wins(costs: StepCosts, steps: list[tuple[int, int]], chosen: int) -> None:
    assert after(costs, steps).choose() == chosen


def test_the_choice_is_the_maximum_of_the_stated_rate() -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(200):
        verify, draft = (torch.rand(4, generator=draw).cumsum(0).tolist() for _ in range(2))
        lengths = DraftLengths(StepCosts(tuple(verify), (0.0, *draft[:3])))
        for _ in range(int(torch.randint(60, (1,), generator=draw))):
            drafted = int(torch.randint(4, (1,), generator=draw))
            lengths.learn(drafted, int(torch.randint(drafted + 1, (1,), generator=draw)))
        rates = []
        for k in range(4):
            chances = torch.tensor([1.0, *lengths.acceptance[:k]], dtype=torch.float64)
            rates.append(float(chances.cumprod(0).sum()) / lengths.costs.of(k))
        assert lengths.choose() == max(range(4), key=lambda k: rates[k])


def test_acceptance_is_that_of_reached_positions() -> None:
    lengths = after(FLAT, [(3, 1)] * 1000 + [(2, 2)] * 1000)
    first, second, third = lengths.acceptance
    assert first > 0.95
    assert second > 0.95
    assert third == pytest.approx(GUESS, abs=1e-3)  # forgotten: it was not drafted for long


def test_given_up_and_tried_again() -> None:
    lengths = after(FLAT, [(3, 0)] * 200)
    waited = 0
    while not lengths.choose():
        lengths.learn(0, 0)
        waited += 1
    assert 20 < waited < 400


def test_costs_of_parts_and_measured_ones(tmp_path: Path) -> None:
    assert StepCosts.of_parts([1.0, 2.0, 3.5], 0.25) == StepCosts(verify=(1.0, 2.0, 3.5), draft=(0.0, 0.25, 0.5))
    assert StepCosts.of_parts([1.0, 2.0, 3.5], 0.25).of(2) == 4.0
    base = tiny_base("llama", tmp_path)
    decoder = Decoder(base, new_heads(HeadsOptions(draft_length=3), base))
    for tree, most in ((None, 3), ("2,1", 2), ("dynamic:4", 3)):
        costs = decoder._step_costs(1, tree)
        assert len(costs.verify) == len(costs.draft) == most + 1
        assert min(costs.verify) > 0
        assert costs.draft[0] == 0 < min(costs.draft[1:])


class Schedule(DraftLengths):
    """A fixed series of K."""

    def __init__(self, series: list[int]) -> None:
        super().__init__(FLAT)
        self.series = series
        self.asked = 0

    def choose(self) -> int:
        self.asked += 1
        return self.series[(self.asked - 1) % len(self.series)]


class Watched(HeadsDrafter):
    """Notes the q of every first draft by the number of anchors before it."""

    def start(self, prompt: torch.Tensor) -> None:
        super().start(prompt)
        self.anchors, self.seen = 0, dict[int, torch.Tensor]()

    def ingest(self, features: torch.Tensor, next_tokens: torch.Tensor) -> None:
        super().ingest(features, next_tokens)
        self.anchors += features.shape[1]

    def draft(self, k: int, previous: torch.Tensor) -> torch.Tensor:
        logits = super().draft(k, previous)
        if k == 1:
            self.seen[self.anchors] = logits.clone()
        return logits


@pytest.mark.parametrize("tree", ["2,1,1", "1,2,1"])
def test_levels_of_a_tree_are_chosen_like_drafts_of_a_chain(tree: str, tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    heads, request = new_heads(HeadsOptions(draft_length=3), base), Request(tree=tree)
    plain, _ = decode(Engine(BaseTarget(base)), [5, 6, 7], 60, 0, request=Request())
    engine = Engine(BaseTarget(base), HeadsDrafter(heads), lengths=Schedule([1, 0, 2]))
    tokens, stats = decode(engine, [5, 6, 7], 60, 3, request=request)
    assert tokens == plain
    assert stats.drafted_at[2] == 0 < stats.drafted_at[1] < stats.drafted_at[0] < stats.steps


@pytest.mark.parametrize("kind", ["recurrent", "sequential", "parallel", "hydra", "medusa"])
@pytest.mark.parametrize("series", [[3, 0, 3], [0, 0, 0, 0, 1], [0] * 40 + [3]])
def test_heads_stay_in_sync_through_steps_without_drafts(kind: str, series: list[int], tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(kind=kind, draft_length=3), base)  # type: ignore[arg-type]
    texts, drafters = [], []
    for lengths in (None, Schedule(series)):
        drafter = Watched(heads)
        engine = Engine(BaseTarget(base), drafter, lengths=lengths)
        tokens, stats = decode(engine, [5, 6, 7], 90, 3, request=Request())
        texts.append(tokens)
        drafters.append(drafter)
        assert max(index for index, count in enumerate(stats.drafted_at) if count) == 2 or lengths
    assert texts[0] == texts[1]
    common = set(drafters[0].seen) & set(drafters[1].seen)
    assert common
    for place in common:
        torch.testing.assert_close(drafters[0].seen[place], drafters[1].seen[place], atol=1e-4, rtol=1e-4)


def test_from_the_command_line_and_python(tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    decoder = Decoder(base, new_heads(HeadsOptions(draft_length=3), base))
    plain = decoder.generate("the user", max_new_tokens=40, draft_length=0)
    found = decoder.generate("the user", max_new_tokens=40, draft_length="auto")
    assert found.token_ids == plain.token_ids
    assert found.stats.draft_length == 3
    for tree in ("2,1", "dynamic:4"):
        found = decoder.generate("the user", max_new_tokens=40, draft_length="auto", tree=tree, lookup=3)
        assert found.token_ids == plain.token_ids
    keyed = [
        decoder.generate("the user", max_new_tokens=40, draft_length=k, temperature=1.0, seed=3, reproducible=True)
        for k in (0, "auto")
    ]
    assert keyed[0].token_ids == keyed[1].token_ids
    assert Decoder(base).generate("the user", max_new_tokens=5, draft_length="auto").stats.draft_length == 0


@pytest.mark.parametrize("value", ["many", -1])
def test_refused(value: object, tmp_path: Path) -> None:
    base = tiny_base("llama", tmp_path)
    decoder = Decoder(base, new_heads(HeadsOptions(draft_length=3), base))
    with pytest.raises(UserError, match="--draft-length"):
        decoder.generate("the user", draft_length=value)  # type: ignore[arg-type]
    assert main(["generate", "--heads", "x", "--prompt", "x", "--draft-length", "many"]) == 2
