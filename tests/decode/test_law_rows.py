"""The engine's law where a row is no distribution, where rounding leaves no residual, and at both ends of a draw."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode.engine import Engine
from decode.request import Request
from decode.walk import Branching
from mtp import verify as verify_module
from mtp.errors import UserError
from mtp.sampling import RandomSource, to_probs
from mtp.verify import Verdict
from tests.decode.laws import BLOCK, CHAIN_RULES, EXACT, P2, PLAIN, Q2, P, Q, law_error, sparse, spoiled, walk_engine
from tests.decode.toys import REFUSED, TableDrafter, TableTarget, decode, table

pytestmark = pytest.mark.usefixtures("one_thread")
JUDGING = ["token", "block"]


# ---- rows of q ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("contexts", [[(2, 0)], [(1, 2)], [(2, 0), (0, 1), (1, 1)]], ids=["second", "first", "many"])
def test_rows_of_q_that_are_no_law_end_the_draft(rule: str, contexts: list[tuple[int, int]]) -> None:
    for value in (torch.nan, torch.inf):
        walked = walk_engine(2, 3, q=spoiled(Q, *contexts, value=value), request=CHAIN_RULES[rule])
        assert walked.error < EXACT
        assert 0 < walked.accepted < walked.drafted
        assert walked.unusable_q > 0
    assert walk_engine(2, 3, request=CHAIN_RULES[rule]).unusable_q == 0


def test_rows_of_q_that_are_no_law_end_the_draft_of_match() -> None:
    walked = walk_engine(2, 3, p=P2, q=spoiled(Q2, (1, 0)), prompt=(0, 1), request=CHAIN_RULES["match"])
    assert walked.error < EXACT
    assert walked.unusable_q > 0


@pytest.mark.parametrize("tree", ["2,1", "dynamic:3"])
def test_a_tree_whose_root_has_no_law_is_empty(tree: str) -> None:
    walked = walk_engine(2, 3, q=spoiled(Q, (1, 2)), request=replace(BLOCK, tree=tree))
    assert walked.error < EXACT
    assert walked.unusable_q > 0
    engine = Engine(TableTarget(P), TableDrafter(spoiled(Q, (1, 2))))
    tokens, stats = decode(engine, [1, 2], 6, 2, request=Request(tree=tree))
    assert tokens == decode(Engine(TableTarget(P)), [1, 2], 6, 0, request=Request())[0]
    assert stats.unusable_q > 0


def test_heads_that_are_unsure_and_heads_that_are_broken_are_told_apart() -> None:
    request = replace(BLOCK, draft_min_confidence=0.1)
    walked = walk_engine(2, 3, q=spoiled(Q, (1, 2)), request=request)
    assert walked.error < EXACT
    assert walked.unusable_q > 0
    assert walk_engine(2, 3, request=request).unusable_q == 0


@pytest.mark.parametrize("rule", JUDGING)
def test_processors_that_leave_no_draft_end_the_draft(rule: str) -> None:
    """After 0 only 1 may follow, which no draft can be."""
    request = Request(temperature=1.0, verify=rule, bad_words_ids=((0, 0), (0, 2)))
    walked = walk_engine(2, 3, request=request, draft_ids=torch.tensor([2, 0]))
    assert walked.error < EXACT
    assert walked.unusable_q > 0
    assert walked.accepted > 0


@pytest.mark.parametrize("rule", JUDGING)
def test_dropping_all_drafts_of_a_step_for_a_later_bad_row_is_exposed(
    monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    """The second draft has no law when the first, after 1 2, was 0. Keeping the first is exact, dropping it is not."""
    q = spoiled(Q, (2, 0))
    assert law_error(2, 3, q=q, request=CHAIN_RULES[rule]) < EXACT
    honest = verify_module.RULES[rule]

    def all_or_nothing(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
        return honest(tokens, q, p, random, torch.where(lengths < tokens.shape[1], 0, lengths))

    monkeypatch.setitem(verify_module.RULES, rule, all_or_nothing)
    assert law_error(2, 3, q=q, request=CHAIN_RULES[rule]) > 0.01


# ---- rows of p ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("context", [(2, 0), (0, 1), (2, 2)])
def test_a_bad_row_of_p_only_refuses_the_texts_that_reach_it(rule: str, context: tuple[int, int]) -> None:
    """A rule may look at such a row behind a rejected draft; the law of the other texts is exact all the same."""
    walked = walk_engine(2, 3, p=spoiled(P, context), request=CHAIN_RULES[rule])
    assert walked.error < EXACT
    assert 0 < walked.truth[REFUSED] < 1
    assert 0 < walked.accepted < walked.drafted


def test_a_bad_row_of_p_only_refuses_the_texts_that_reach_it_by_match() -> None:
    walked = walk_engine(2, 3, p=spoiled(P2, (1, 0)), q=Q2, prompt=(0, 1), request=CHAIN_RULES["match"])
    assert walked.error < EXACT
    assert 0 < walked.truth[REFUSED] < 1


@pytest.mark.parametrize("asked", [BLOCK, PLAIN, replace(BLOCK, tree="2,1")], ids=["block", "token", "tree"])
def test_a_bad_row_of_p_behind_the_end_of_the_text_is_no_error(asked: Request) -> None:
    """Plain decoding ends at the token before it, so drafted decoding must, whatever the block holds beyond."""
    assert walk_engine(2, 3, p=spoiled(P, (2, 1)), eos=(1,), request=asked).error < EXACT

    def nothing_after_the_end(_: int, text: Tensor) -> list[int]:
        return [] if 1 in text[2:].tolist() else [0, 1, 2]

    constrained = replace(asked, prefix_allowed_tokens_fn=nothing_after_the_end)
    assert walk_engine(2, 3, eos=(1,), request=constrained).error < EXACT


@pytest.mark.parametrize("rule", JUDGING)
def test_processors_that_leave_no_token_only_refuse_the_texts_that_reach_it(rule: str) -> None:
    request = Request(
        temperature=1.0,
        verify=rule,
        prefix_allowed_tokens_fn=lambda _, text: [] if text[-2:].tolist() in ([2, 0], [0, 1]) else [0, 1, 2],
    )
    walked = walk_engine(2, 3, request=request)
    assert walked.error < EXACT
    assert 0 < walked.truth[REFUSED] < 1
    assert 0 < walked.accepted < walked.drafted


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_a_bad_row_of_p_behind_a_draft_that_is_never_kept_is_no_error(rule: str) -> None:
    """p never says 0, the only draft; the row after it is NaN, and no text gets there."""
    p, q = spoiled(sparse(P, *[(a, b, 0) for a in range(3) for b in range(3)]), (2, 0)), Q.clone()
    q[..., 1:] = -torch.inf
    walked = walk_engine(2, 3, p=p, q=q, request=CHAIN_RULES[rule])
    assert walked.error < EXACT
    assert REFUSED not in walked.law
    assert walked.accepted == 0 < walked.drafted


# ---- rounding ----------------------------------------------------------------------------------------------------


class Refusing(Branching):
    """Rejects the drafts at `places` of each block (default: all), though p = q; what rounding could do."""

    places: Sequence[int] | None = None

    def bernoulli(self, prob: Tensor) -> Tensor:
        assert prob.numel() == 0 or bool((prob == 1).all())
        passed = torch.zeros_like(prob, dtype=torch.bool)
        if self.places is not None:
            passed[:] = True
            for place in self.places:
                passed[:, place : place + 1] = False
        return passed


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("places", [None, [0], [1], [0, 1]])
def test_a_rejection_of_equal_laws_falls_back_to_p(rule: str, places: list[int] | None) -> None:
    """No residual is left: the token comes from p, which is counted, and nothing impossible is emitted."""
    p = sparse(P, *[(a, b, (a + b) % 3) for a in range(3) for b in range(3)])
    source = type("Source", (Refusing,), {"places": places})
    # [0] by the block rule: the second draft passes and takes the first with it; a block of one draft is rejected.
    takes_along = rule == "block" and places == [0]
    walked = walk_engine(2, 5 if takes_along else 3, p=p, q=p, request=CHAIN_RULES[rule], source=source)
    assert walked.error < EXACT
    assert walked.law.keys() == walked.truth.keys()
    assert walked.residual_empty > 0
    assert walked.accepted < walked.drafted
    assert (walked.accepted > 0) == (places == [1] or takes_along)


# ---- draws at both ends ------------------------------------------------------------------------------------------


class Fixed(RandomSource):
    """The given number for every uniform; `lax` compares with `<=`, a mutant."""

    def __init__(self, value: float, lax: bool = False) -> None:
        super().__init__(0)
        self.value, self.lax = value, lax

    def uniform(self, shape: Sequence[int]) -> Tensor:
        return torch.full(tuple(shape), self.value, dtype=torch.float64)

    def bernoulli(self, prob: Tensor) -> Tensor:
        return self.uniform(prob.shape) <= prob if self.lax else super().bernoulli(prob)


def is_possible(random: RandomSource, p: Tensor, q: Tensor, request: Request, prompt: tuple[int, int]) -> bool:
    """Whether the engine's text has a chance above 0 under p."""
    engine, draft_length = Engine(TableTarget(p), TableDrafter(q)), 3 if request.tree is None else 2
    tokens, stats = decode(engine, list(prompt), 8, draft_length, request=request, random=random)
    assert stats.drafted > 0
    text, law = [*prompt, *tokens], to_probs(p, request)
    return all(law[text[i - 2], text[i - 1], text[i]] > 0 for i in range(2, len(text)))


@pytest.mark.parametrize("value", [0.0, 2.0**-54, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("tree", [None, "2,1", "dynamic:3"])
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_nothing_impossible_is_emitted_at_either_end_of_a_draw(rule: str, tree: str | None, value: float) -> None:
    request = Request(temperature=1.0, verify=rule, tree=tree)
    for seed in range(6):
        zeros = [(a, b, (a * seed + b) % 3) for a in range(3) for b in range(3)]
        for prompt in ((0, 1), (2, 0)):
            assert is_possible(Fixed(value), sparse(table(seed), *zeros), table(seed + 50), request, prompt)


@pytest.mark.parametrize("rule", JUDGING)
def test_a_draw_that_may_equal_its_chance_emits_what_p_forbids(rule: str) -> None:
    """Why `bernoulli` is strict: u = 0 against a chance of 0. The mutant `<=` keeps a draft of probability 0."""
    p = sparse(P, *[(a, b, 0) for a in range(3) for b in range(3)])
    assert is_possible(Fixed(0.0), p, Q, CHAIN_RULES[rule], (1, 2))
    assert not is_possible(Fixed(0.0, lax=True), p, Q, CHAIN_RULES[rule], (1, 2))


@pytest.mark.parametrize("asked", [PLAIN, BLOCK], ids=["token", "block"])
def test_a_bad_row_of_p_that_is_reached_is_refused_by_name(asked: Request) -> None:
    with pytest.raises(UserError, match="base returned NaN"):
        decode(Engine(TableTarget(spoiled(P, (1, 2))), TableDrafter(Q)), [1, 2], 3, 2, request=asked)


class Grammar:
    """A processor of the user's that allows one token, and refuses to be shown any other text."""

    stateless = True

    def __init__(self, only: int, prompt_length: int) -> None:
        self.only, self.prompt_length = only, prompt_length

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        assert (text[:, self.prompt_length :] == self.only).all(), "a text that can never come to be"
        others = torch.arange(logits.shape[1]) != self.only
        return logits.masked_fill(others, -torch.inf)


@pytest.mark.parametrize(
    "asked", [Request(), PLAIN, BLOCK, replace(BLOCK, tree="2,1")], ids=["T0", "token", "block", "tree"]
)
def test_no_processor_is_shown_a_draft_that_q_could_not_make(asked: Request) -> None:
    """No draft can be the one token that is allowed, so there is none, and it is counted."""
    request = replace(asked, processors=(Grammar(0, 2),))
    engine = Engine(TableTarget(P), TableDrafter(Q, draft_ids=torch.tensor([1, 2])))
    tokens, stats = decode(engine, [1, 2], 4, 2, request=request)
    assert tokens == (0, 0, 0, 0)
    assert (stats.drafted, stats.unusable_q) == (0, 3)


def test_logits_that_a_temperature_takes_out_of_range_are_refused() -> None:
    """Finite in float32, but not divided by 0.02: never a token for a row of NaN."""
    p = torch.full((3, 3, 3), 3e38, dtype=torch.float32)
    p[..., 1] = -3e38
    with pytest.raises(UserError, match="NaN or infinite"):
        decode(Engine(TableTarget(p)), [1, 2], 2, 0, request=replace(PLAIN, temperature=0.02))


@pytest.mark.parametrize("asked", [Request(), PLAIN, BLOCK], ids=["greedy", "token", "block"])
def test_a_row_that_processors_emptied_is_not_blamed_on_the_base(asked: Request) -> None:
    request = replace(asked, suppress_tokens=(0, 1, 2))
    with pytest.raises(UserError, match="processors leave no token"):
        decode(Engine(TableTarget(P), TableDrafter(Q)), [1, 2], 3, 2, request=request)
