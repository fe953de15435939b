"""Adaptive draft length: which ways to draft less keep the engine's law, and which bend it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from decode import engine as engine_module
from decode.chain import Chain, Outcome
from decode.laws import RowCheck
from mtp.sampling import RandomSource
from mtp.verify import Rule, at_tokens, leading
from tests.decode.laws import CHAIN_RULES, EXACT, P2, Q2, law_error, walk_engine

pytestmark = pytest.mark.usefixtures("one_thread")
JUDGING = ["token", "block"]
STOPS = {
    "min-confidence": {"draft_min_confidence": 0.6},
    "max-entropy": {"draft_max_entropy": 0.9},
    "min-prob": {"draft_min_prob": 0.3},
    "all": {"draft_min_confidence": 0.5, "draft_max_entropy": 1.0, "draft_min_prob": 0.2},
}


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("new_tokens", [3, 4])
def test_adaptive_draft_length_keeps_the_law(rule: str, stop: str, new_tokens: int) -> None:
    if new_tokens == 4 and rule == "token":
        new_tokens = 3  # its walk is five times as long
    asked = CHAIN_RULES[rule]
    walked = walk_engine(3, new_tokens, request=replace(asked, **STOPS[stop]))  # type: ignore[arg-type]
    assert walked.error < EXACT
    assert 0 < walked.accepted < walked.drafted
    if new_tokens == 3:  # the setting acts
        assert walked.mean["drafted"] < walk_engine(3, new_tokens, request=asked).mean["drafted"] - 0.01


@pytest.mark.parametrize("stop", STOPS)
def test_adaptive_draft_length_keeps_the_law_of_match(stop: str) -> None:
    request = replace(CHAIN_RULES["match"], **STOPS[stop])  # type: ignore[arg-type]
    assert law_error(2, 3, p=P2, q=Q2, prompt=(0, 1), request=request) < EXACT


def test_a_draft_is_never_made_where_q_is_too_unsure() -> None:
    """A bar that no row of q passes: plain decoding, by the same law."""
    walked = walk_engine(3, 3, request=replace(CHAIN_RULES["block"], draft_min_confidence=1.0))
    assert walked.drafted == 0
    assert walked.error < EXACT


# ---- mutants -----------------------------------------------------------------------------------------------------


def cut(shorten: Callable[[Chain], Tensor]) -> Callable[..., Chain]:
    """A drafting that makes all drafts and then counts only the first `shorten(chain)`."""

    def draft(*arguments: object) -> Chain:
        chain = honest(*arguments)  # type: ignore[arg-type]
        if chain.q.shape[1]:
            chain.lengths = shorten(chain)
        return chain

    honest = engine_module.draft_chain
    return draft


def discard_low_q(chain: Chain) -> Tensor:
    """A sampled draft is thrown away because its q is low."""
    return leading(at_tokens(chain.q, chain.block[:, 1:]) > 0.3, chain.lengths)


def discard_low_q_without_the_first(chain: Chain) -> Tensor:
    """The same, but one draft is always made."""
    return discard_low_q(chain).clamp(min=1)


def one_draft_less(chain: Chain) -> Tensor:
    """No mutant: how many count does not depend on what was drawn."""
    return (chain.lengths - 1).clamp(min=0)


@pytest.mark.parametrize("rule", JUDGING)
def test_discarding_a_draft_because_its_q_is_low_is_exposed(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    request = CHAIN_RULES[rule]
    for shorten, wrong in ((one_draft_less, False), (discard_low_q, True), (discard_low_q_without_the_first, True)):
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "draft_chain", cut(shorten))
            error = law_error(2, 3, request=request)
        assert error > 0.01 if wrong else error < EXACT, shorten


@pytest.mark.parametrize("rule", JUDGING)
def test_choosing_the_length_after_a_look_at_p_is_exposed(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """Only drafts that p likes are judged; those that would be rejected anyway are said never to have been made."""
    assert law_error(2, 3, request=CHAIN_RULES[rule]) < EXACT
    honest = Chain.judge

    def judge(self: Chain, rule: str | Rule, p: Tensor, check: RowCheck, random: RandomSource) -> Outcome:
        drafts = self.block[:, 1:]
        if drafts.shape[1]:
            self.lengths = leading(at_tokens(p[None, :-1], drafts) >= at_tokens(self.q, drafts), self.lengths)
        return honest(self, rule, p, check, random)

    monkeypatch.setattr(Chain, "judge", judge)
    walked = walk_engine(2, 3, request=CHAIN_RULES[rule])
    assert walked.accepted > 0
    assert walked.error > 0.01


@pytest.mark.parametrize("rule", JUDGING)
def test_stopping_before_a_draft_by_a_look_at_it_is_exposed(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """draft_min_prob with the unlikely draft left out, where it should be the last one in."""
    request = replace(CHAIN_RULES[rule], draft_min_prob=0.3)
    assert law_error(2, 3, request=request) < EXACT

    def leave_out(chain: Chain) -> Tensor:
        unlikely = at_tokens(chain.q, chain.block[:, 1:])[:, -1] < 0.3
        return chain.lengths - unlikely.long()

    monkeypatch.setattr(engine_module, "draft_chain", cut(leave_out))
    assert law_error(2, 3, request=request) > 0.01
