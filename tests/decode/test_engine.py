"""The loop: identical drafters, head state, stopping inside blocks, counts, and rows that are not finite."""

import pytest
import torch
from torch import Tensor

from decode.drafters import HeadsDrafter
from decode.engine import Engine
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.target import BaseTarget
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from mtp.sampling import RandomSource
from tests.decode.toys import PLAIN, BaseDrafter, TableDrafter, TableTarget, decode, table
from tests.tiny import CONTEXT, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = Request()
K = 3


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> FrozenBase:
    return tiny_base("llama", tmp_path_factory.mktemp("base"))


# ---- a drafter that is the base ----------------------------------------------------------------------------------


class Stale(BaseDrafter):
    """The fault that identity must expose: after a full accept, the last draft never reaches the drafter's cache."""

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        full = 1 < next_tokens.shape[1] == self.drafted + 1
        super().ingest(features, next_tokens[:, 1:] if full else next_tokens)


def identity_run(base: FrozenBase, drafter: BaseDrafter, request: Request, total: int) -> DecodeStats:
    """`total` tokens or more over several prompts, the first of one token."""
    stats = DecodeStats(request.reported_rule, K)
    engine = Engine(BaseTarget(base), drafter)
    seed = 0
    while stats.committed < total:
        prompt = list(range(3, 4 + seed))
        tokens, one = decode(engine, prompt, CONTEXT - len(prompt), K, request=request, random=RandomSource(seed))
        assert len(tokens) == CONTEXT - len(prompt)
        stats.merge(one)
        seed += 1
    return stats


@pytest.mark.parametrize("asked", [GREEDY, PLAIN], ids=["greedy", "token"])
def test_a_drafter_that_is_the_base_is_always_accepted(base: FrozenBase, asked: Request) -> None:
    """1,000 tokens. Draft and verification differ by rounding only, which rejects about once in 10 million drafts."""
    stats = identity_run(base, BaseDrafter(base), asked, 1_000)
    assert stats.committed >= 1_000
    assert stats.drafted == stats.accepted > 700
    assert stats.accepted_per_position == [1.0] * K
    assert stats.alpha == pytest.approx([1.0] * K, abs=1e-4)


def test_a_stale_drafter_is_not_always_accepted(base: FrozenBase) -> None:
    stats = identity_run(base, Stale(base), GREEDY, 200)
    assert stats.accepted < 0.9 * stats.drafted


# ---- head state --------------------------------------------------------------------------------------------------


class Recorder(HeadsDrafter):
    """Notes the logits of every first draft and the committed text they belong to."""

    def start(self, prompt: Tensor) -> None:
        super().start(prompt)
        self.text = prompt[:, :1]
        self.first: list[tuple[Tensor, Tensor]] = []

    def ingest(self, features: Tensor, next_tokens: Tensor) -> None:
        super().ingest(features, next_tokens)
        self.text = torch.cat([self.text, next_tokens], dim=1)

    def draft(self, k: int, previous: Tensor) -> Tensor:
        logits = super().draft(k, previous)
        if k == 1:
            self.first.append((self.text, logits))
        return logits


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
def test_head_state_equals_a_fresh_recomputation(base: FrozenBase, kind: str) -> None:
    """After rejections, partial and full accepts alike."""
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(kind=kind, draft_length=K), base)  # type: ignore[arg-type]
    recorder = Recorder(heads)
    request = Request(temperature=2.0)
    _, stats = decode(Engine(BaseTarget(base), recorder), [5, 6, 7], 60, K, request=request)
    assert stats.histogram[0] > 0
    assert sum(stats.histogram[1:]) > 3
    assert len(recorder.first) >= stats.steps - 1  # the last step may have no room to draft
    for text, logits in recorder.first:
        fresh = HeadsDrafter(heads)
        fresh.start(text)
        features = base.forward(text[:, :-1], feature_layers=fresh.feature_layers).features
        fresh.ingest(features, text[:, 1:])
        torch.testing.assert_close(fresh.draft(1, text[:, -1]), logits, atol=2e-4, rtol=1e-4)


def test_features_and_logits_equal_a_run_without_cache(base: FrozenBase) -> None:
    """The target after rollbacks against one forward over the whole text."""
    target = BaseTarget(base)
    target.start((0, 2))
    text = torch.tensor([[3, 4, 5, 6, 7, 8]])
    target.forward(text[:, :3], 0)
    target.forward(torch.tensor([[9, 10, 11]]), 3)
    target.rollback(3)
    output = target.forward(text[:, 3:], 3)
    whole = base.forward(text, feature_layers=(0, 2))
    torch.testing.assert_close(output.features, whole.features[:, 3:], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits, base.logits(whole.hidden[:, 3:]), atol=1e-4, rtol=1e-4)


# ---- stopping inside blocks --------------------------------------------------------------------------------------


def counting(vocab: int = 12) -> Tensor:
    """Logits of a base that counts: after b comes b + 1."""
    logits = torch.full((vocab, vocab, vocab), -torch.inf, dtype=torch.float64)
    for b in range(vocab):
        logits[:, b, (b + 1) % vocab] = 0.0
    return logits


def run_counting(
    new_tokens: int,
    draft_length: int,
    eos: tuple[int, ...] = (),
    context: int = 1_000,
    prompt: tuple[int, ...] = (0, 1),
) -> tuple[tuple[int, ...], str | None, DecodeStats]:
    stats = DecodeStats("token", draft_length)
    engine = Engine(TableTarget(counting(), context), TableDrafter(counting(), max_draft_length=4))
    stopping = Stopping(room(len(prompt), context, new_tokens), eos)
    steps = list(engine.run(prompt, request=PLAIN, stopping=stopping, random=RandomSource(0), stats=stats))
    assert [step.finish_reason for step in steps[:-1]] == [None] * (len(steps) - 1)
    tokens = tuple(token for step in steps for token in step.tokens)
    assert stats.committed == len(tokens) == sum(len(step.drafted) for step in steps)
    assert stats.accepted == sum(sum(step.drafted) for step in steps)
    assert stats.steps == sum(stats.histogram) == len(steps)
    assert sum(size * count for size, count in enumerate(stats.histogram, start=1)) == len(tokens)
    return tokens, steps[-1].finish_reason, stats


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("new_tokens", [1, 2, 4, 5, 6, 11])
def test_length_limit(new_tokens: int, draft_length: int) -> None:
    tokens, reason, stats = run_counting(new_tokens, draft_length)
    assert tokens == tuple((2 + i) % 12 for i in range(new_tokens))
    assert reason == "length"
    assert stats.accepted == stats.drafted
    assert stats.steps == -(-new_tokens // (draft_length + 1))


@pytest.mark.parametrize("draft_length", [0, 4])
@pytest.mark.parametrize("position", range(1, 8))
def test_end_of_sequence_at_every_position_of_a_block(position: int, draft_length: int) -> None:
    """The id that ends the text is kept, nothing after it, and the discarded tail is in no count."""
    eos = 1 + position
    tokens, reason, stats = run_counting(11, draft_length, eos=(eos,))
    assert tokens == tuple(range(2, eos + 1))
    assert reason == "eos"
    cut_at_a_draft = draft_length > 0 and position % 5 > 0
    bonus = stats.steps - cut_at_a_draft
    assert stats.accepted == stats.drafted == len(tokens) - bonus
    if draft_length:
        assert stats.accepted_per_position[0] == 1.0


@pytest.mark.parametrize("draft_length", [0, 1, 4])
@pytest.mark.parametrize("left", [1, 2, 3, 5, 6])
def test_context_end(left: int, draft_length: int) -> None:
    """The table refuses to be fed beyond the context, so a step that drafts too far would fail."""
    tokens, reason, _ = run_counting(100, draft_length, context=2 + left)
    assert len(tokens) == left
    assert reason == "context"


def test_prompt_of_one_token_drafts_from_the_second_step_on() -> None:
    tokens, _, stats = run_counting(6, 4, prompt=(3,))
    assert tokens == (4, 5, 6, 7, 8, 9)
    assert stats.histogram == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("prompt", "new_tokens", "message"),
    [(0, 5, "the prompt has no tokens"), (10, 5, "at most 10"), (11, 5, "at most 10"), (3, 0, "--max-new-tokens is 0")],
)
def test_impossible_limits_are_refused(prompt: int, new_tokens: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        room(prompt, 10, new_tokens)


@pytest.mark.parametrize("asked", [-1, 5])
def test_draft_length_beyond_the_heads_is_refused(asked: int) -> None:
    engine = Engine(TableTarget(counting()), TableDrafter(counting(), max_draft_length=4))
    with pytest.raises(UserError, match=f"--draft-length is {asked}.*0 .off. to 4"):
        engine.check_draft_length(asked)
    assert engine.check_draft_length(None) == 4
    with pytest.raises(UserError, match="no heads"):
        Engine(TableTarget(counting())).check_draft_length(1)


# ---- rows that are not finite, and counts ------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("asked", [GREEDY, PLAIN], ids=["greedy", "token"])
def test_drafts_that_are_not_finite_are_dropped_and_counted(bad: float, asked: Request) -> None:
    q = counting()
    q[:, 4:, 0] = bad
    engine = Engine(TableTarget(counting()), TableDrafter(q, max_draft_length=4))
    tokens, stats = decode(engine, [0, 1], 10, 4, request=asked)
    assert tokens == (2, 3, 4, 5, 6, 7, 8, 9, 10, 11)
    assert stats.unusable_q == stats.steps - 1  # the last step has no room to draft
    assert stats.accepted == stats.drafted == 3  # 2, 3 and 4; nothing can be drafted after 4


@pytest.mark.parametrize("draft_length", [0, 2])
@pytest.mark.parametrize("asked", [GREEDY, PLAIN], ids=["greedy", "token"])
def test_a_base_that_is_not_finite_is_refused(draft_length: int, asked: Request) -> None:
    p = counting()
    p[:, 5, 0] = torch.nan
    with pytest.raises(UserError, match="base returned NaN"):
        decode(Engine(TableTarget(p), TableDrafter(counting())), [0, 1], 10, draft_length, request=asked)


def test_alpha_matches_the_tables() -> None:
    """Laws that do not depend on the context: alpha is their overlap at every position, tau follows from it."""
    p, q = torch.tensor([1 / 3, 2 / 3]).double(), torch.tensor([2 / 3, 1 / 3]).double()
    target, drafter = TableTarget(p.log().expand(2, 2, 2)), TableDrafter(q.log().expand(2, 2, 2))
    _, stats = decode(Engine(target, drafter), [0, 1], 1_500, 2)
    assert stats.alpha == pytest.approx([2 / 3, 2 / 3])
    # 10/9 accepted drafts per step (Sun et al. 2024, section 3); 0.15 is 4 standard deviations of the mean.
    assert stats.accept_len == pytest.approx(1 + 10 / 9, abs=0.15)


def test_draft_vocabulary_reaches_only_its_tokens() -> None:
    allowed = torch.tensor([7, 2, 9])
    q = table(3, vocab=12)
    engine = Engine(TableTarget(table(4, vocab=12)), TableDrafter(q, draft_ids=allowed))
    stats = DecodeStats("token", 3)
    stopping = Stopping(room(2, 1_000, 200))
    steps = list(engine.run([0, 1], request=PLAIN, stopping=stopping, random=RandomSource(0), stats=stats))
    tokens = [pair for step in steps for pair in zip(step.tokens, step.drafted, strict=True)]
    assert {token for token, is_draft in tokens if is_draft} == set(allowed.tolist())
    assert len({token for token, is_draft in tokens if not is_draft}) == 12


@pytest.mark.parametrize("tree", [None, "2,2"])
def test_a_step_names_the_drafts_that_its_last_token_replaces(tree: str | None) -> None:
    """What is rejected is never what came in its place, and nothing is where all drafts stay."""
    asked = Request(temperature=1.0, tree=tree, verify="token")
    stats = DecodeStats(asked.reported_rule, 2, tree)
    engine, stopping = (
        Engine(TableTarget(table(4, vocab=5)), TableDrafter(table(3, vocab=5))),
        Stopping(room(2, 400, 300)),
    )
    steps = list(engine.run([0, 1], request=asked, stopping=stopping, random=RandomSource(0), stats=stats))
    assert any(step.rejected for step in steps)
    assert not any(step.tokens[-1] in step.rejected for step in steps)
    assert all(not step.rejected for step in steps if step.drafted[-1] or len(step.tokens) == 3)
    if (
        tree is None
    ):  # every step here drafts two, but the last ones near the limit, and commits fewer if one was rejected
        full = steps[:-2]
        assert all(bool(step.rejected) == (len(step.tokens) < 3) for step in full)
