"""Memory in front of base and heads: the same texts for the same seeds, from far fewer forwards."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode.drafters import HeadsDrafter
from decode.engine import Engine
from decode.memo import MemoDrafter, MemoTarget
from decode.request import Request
from decode.target import BaseTarget, TargetOutput
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.heads import Heads
from mtp.initialise import new_heads
from mtp.keyed import KeyedSource
from mtp.sampling import RandomSource
from tests.decode.toys import decode
from tests.tiny import exact_base

pytestmark = pytest.mark.usefixtures("one_thread")
K, NEW = 3, 7
PROMPTS = ([5, 6, 7], [5, 6, 7, 8, 9], [20], [5, 30])
LAW = Request(temperature=1.0, top_k=3, draft_temperature=2.0)


class CountingTarget(BaseTarget):
    """Notes how many tokens each forward is over."""

    def __init__(self, base: FrozenBase) -> None:
        super().__init__(base)
        self.forwards: list[int] = []

    def forward(self, tokens: Tensor, num_logits: int) -> TargetOutput:
        self.forwards.append(tokens.shape[1])
        return super().forward(tokens, num_logits)


class CountingDrafter(HeadsDrafter):
    drafts = 0

    def draft(self, k: int, previous: Tensor) -> Tensor:
        self.drafts += 1
        return super().draft(k, previous)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    """float64: sums over other numbers of rows differ by 1e-15, which turns no draw."""
    return exact_base("qwen2")


def heads_of(base: FrozenBase, kind: str) -> Heads:
    torch.manual_seed(0)
    return new_heads(HeadsOptions(kind=kind, draft_length=K), base).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
@pytest.mark.parametrize("rule", ["token", "block", "match", "greedy", "reproducible"])
def test_same_texts_from_fewer_forwards(base: FrozenBase, kind: str, rule: str) -> None:
    """Six seeds, every K, four prompts in turn; one memory serves all of them."""
    heads = heads_of(base, kind)
    target, drafter = CountingTarget(base), CountingDrafter(heads)
    memo = Engine(MemoTarget(target), MemoDrafter(drafter))
    plain_target, plain_drafter = CountingTarget(base), CountingDrafter(heads)
    plain = Engine(plain_target, plain_drafter)
    texts, accepted = set(), 0
    for seed in range(6):
        for draft_length in range(1, K + 1):
            prompt = PROMPTS[(seed + draft_length) % len(PROMPTS)]
            request, random = request_of(rule, seed)
            remembered = decode(memo, prompt, NEW, draft_length, request=request, random=random)
            request, random = request_of(rule, seed)
            run = decode(plain, prompt, NEW, draft_length, request=request, random=random)
            assert remembered[0] == run[0]
            stats = remembered[1], run[1]
            assert [(s.drafted, s.accepted, s.histogram) for s in stats] == [
                (s.drafted, s.accepted, s.histogram) for s in stats[::-1]
            ]
            assert stats[0].alpha == pytest.approx(stats[1].alpha)
            texts.add((len(prompt), run[0]))
            accepted += run[1].accepted
    assert len(texts) >= (len(PROMPTS) if rule == "greedy" else 12)
    assert accepted > 0 or (rule, kind) == ("greedy", "recurrent")  # random heads never name the likeliest token
    assert len(target.forwards) < (0.4 if rule == "greedy" else 0.95) * len(plain_target.forwards)
    assert drafter.drafts < 3 * plain_drafter.drafts  # a new beginning drafts again from its first position


def request_of(rule: str, seed: int) -> tuple[Request, RandomSource]:
    if rule == "greedy":
        return Request(), RandomSource(seed)
    if rule == "reproducible":
        return replace(LAW, draft_temperature=None, reproducible=True, seed=seed), KeyedSource(seed)
    return replace(LAW, verify=rule), RandomSource(seed)


def test_a_text_that_is_known_runs_nothing(base: FrozenBase) -> None:
    heads = heads_of(base, "medusa")
    target, drafter = CountingTarget(base), CountingDrafter(heads)
    memo = Engine(MemoTarget(target), MemoDrafter(drafter))
    first = decode(memo, PROMPTS[1], NEW, K, request=LAW, random=RandomSource(4))
    run, drafted = len(target.forwards), drafter.drafts
    assert run == first[1].steps + 1
    other = decode(memo, PROMPTS[3], NEW, K, request=LAW, random=RandomSource(4))
    assert len(target.forwards) == run + other[1].steps  # the beginning of its prompt is known
    again, drafted_again = len(target.forwards), drafter.drafts
    assert decode(memo, PROMPTS[1], NEW, K, request=LAW, random=RandomSource(4))[0] == first[0]
    assert (len(target.forwards), drafter.drafts) == (again, drafted_again)
    assert drafted_again > drafted


def test_many_texts_soon_cost_nothing(base: FrozenBase) -> None:
    """Three possible tokens, three of them committed: 150 texts need the base as often as some tens do."""
    target = CountingTarget(base)
    memo = Engine(MemoTarget(target), MemoDrafter(HeadsDrafter(heads_of(base, "medusa"))))
    counts, steps = [], 0
    random = RandomSource(0)
    for _ in range(3):
        for _ in range(50):
            steps += decode(memo, [5, 6], 3, 2, request=LAW, random=random)[1].steps
        counts.append(len(target.forwards))
    assert counts[2] - counts[1] < counts[0] / 2
    assert counts[2] < steps / 2


def test_a_prompt_costs_only_what_differs(base: FrozenBase) -> None:
    """The inner cache goes back to where the texts part."""
    target = CountingTarget(base)
    memo = MemoTarget(target)
    for prompt, expected in (([5, 6, 7, 8], [4]), ([5, 6, 9], [1]), ([5, 6, 7, 8], []), ([5, 6, 7, 8, 4], [3])):
        memo.start(())
        target.forwards.clear()
        output = memo.forward(torch.tensor([prompt]), 1)
        assert target.forwards in (expected, [len(prompt)])
        whole = base.logits(base.forward(torch.tensor([prompt])).hidden[:, -1:])
        torch.testing.assert_close(output.logits, whole, atol=1e-10, rtol=1e-10)


def test_logits_that_were_not_asked_for_come_later(base: FrozenBase) -> None:
    target = CountingTarget(base)
    memo = MemoTarget(target)
    memo.start((1, 3))
    tokens = torch.tensor([[5, 6, 7]])
    silent = memo.forward(tokens, 0)
    assert silent.logits.shape == (1, 0, base.vocab_size)
    memo.rollback(1)
    output = memo.forward(tokens[:, 1:], 2)
    whole = base.forward(tokens, feature_layers=(1, 3))
    torch.testing.assert_close(output.logits, base.logits(whole.hidden[:, 1:]), atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(output.features, whole.features[:, 1:], atol=1e-10, rtol=1e-10)
    assert target.forwards == [3, 2]


def test_other_feature_layers_forget_everything(base: FrozenBase) -> None:
    memo = MemoTarget(BaseTarget(base))
    tokens = torch.tensor([[5, 6, 7]])
    for layers in ((1,), (2, 3), (1,)):
        memo.start(layers)
        expected = base.forward(tokens, feature_layers=layers).features
        torch.testing.assert_close(memo.forward(tokens, 1).features, expected, atol=1e-10, rtol=1e-10)


def test_trees_are_refused(base: FrozenBase) -> None:
    memo = MemoTarget(BaseTarget(base))
    drafter = MemoDrafter(HeadsDrafter(heads_of(base, "medusa")))
    none = torch.zeros(1, dtype=torch.long)
    calls = (lambda: memo.forward_tree(none[None], none, none), lambda: memo.keep(0, []), lambda: drafter.fork(none))
    for call in calls:
        with pytest.raises(NotImplementedError, match="chains only"):
            call()
