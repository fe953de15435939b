"""Faults of the block rule that real ports had, each killed by the engine's law, and what the rule gains.

`rebuilt` is the rule written anew, with one switch for each fault.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from decode import engine as engine_module
from decode.chain import Chain
from mtp.sampling import RandomSource
from mtp.verify import RULES, Rule, Verdict, leading, token_rule
from tests.decode.laws import BLOCK, EXACT, P2, PLAIN, Q2, accepted_law, law_error, mean_accepted, toy
from tests.decode.toys import table, total_variation

pytestmark = pytest.mark.usefixtures("one_thread")


def rebuilt(
    *,
    stop_at_the_first_failure: bool = False,
    residual_of_the_token_rule: bool = False,
    last_from_the_full_block: bool = False,
    weight_may_exceed_one: bool = False,
    next_p_is_this_one: bool = False,
    next_q_is_this_one: bool = False,
    threshold_is_the_weight: bool = False,
    residual_weight_of_the_last: bool = False,
) -> Rule:
    """The block rule for one text, in plain steps. Without a switch it is right."""

    def rule(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
        count, block = int(lengths[0]), tokens.shape[1]
        weights, thresholds = [torch.ones((), dtype=torch.float64)], []
        for i in range(count):
            weight = weights[-1] * p[0, i, tokens[0, i]] / q[0, i, tokens[0, i]]
            weights.append(weight if weight_may_exceed_one else weight.clamp(max=1))
            ends = i + 1 == (block if last_from_the_full_block else count)
            if ends or threshold_is_the_weight:
                thresholds.append(weights[-1].clamp(max=1))
                continue
            next_p = p[0, i if next_p_is_this_one else i + 1]
            next_q = q[0, i if next_q_is_this_one else i + 1]
            gain = (weights[-1] * next_p - next_q).relu().sum()
            below = gain + 1 - weights[-1]
            thresholds.append((gain / below).clamp(0, 1) if below > 0 else torch.ones_like(gain))
        passed = random.bernoulli(torch.stack(thresholds)) if thresholds else torch.zeros(0, dtype=torch.bool)
        if stop_at_the_first_failure:
            kept = int(leading(passed[None], lengths))
        else:
            kept = max((i + 1 for i in range(count) if passed[i]), default=0)
        row, weight = p[0, kept], weights[-1 if residual_weight_of_the_last else kept]
        if kept < count:
            residual = ((1.0 if residual_of_the_token_rule else weight) * row - q[0, kept]).relu()
            row = residual if residual.sum() > 0 else row
        accepted = torch.tensor([kept])
        return Verdict(accepted, random.categorical(row[None]), accepted < 0)

    return rule


def fixed_shorter_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One draft of each step of two or more does not count, whatever it is: exact, as nothing was looked at."""
    honest = engine_module.draft_chain

    def draft(*arguments: object) -> Chain:
        chain = honest(*arguments)  # type: ignore[arg-type]
        chain.lengths = chain.lengths - (chain.lengths > 1).long()
        return chain

    monkeypatch.setattr(engine_module, "draft_chain", draft)


def block_error() -> float:
    """Whole blocks of two and of three drafts."""
    return max(law_error(2, 3, request=BLOCK), law_error(3, 4, p=P2, q=Q2, prompt=(0, 1), request=BLOCK))


def test_the_rebuilt_rule_itself_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the mutants fail by is their switch. It also keeps as many drafts as the real one."""
    real = accepted_law(3)
    monkeypatch.setitem(RULES, "block", rebuilt())
    assert block_error() < EXACT
    assert total_variation(accepted_law(3), real) < EXACT
    fixed_shorter_block(monkeypatch)
    assert block_error() < EXACT


@pytest.mark.parametrize(
    "fault",
    [
        "stop_at_the_first_failure",
        "residual_of_the_token_rule",
        "weight_may_exceed_one",
        "next_p_is_this_one",
        "next_q_is_this_one",
        "threshold_is_the_weight",
        "residual_weight_of_the_last",
    ],
)
def test_a_wrong_block_rule_is_exposed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    assert block_error() < EXACT
    monkeypatch.setitem(RULES, "block", rebuilt(**{fault: True}))
    assert block_error() > 0.001


def test_a_last_index_that_looks_beyond_a_shorter_block_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the block is cut short, the new last draft must pass by its weight alone."""
    fixed_shorter_block(monkeypatch)
    assert block_error() < EXACT
    mutant: dict[str, Any] = {"last_from_the_full_block": True}
    monkeypatch.setitem(RULES, "block", rebuilt(**mutant))
    assert block_error() > 0.001


def test_the_token_rule_in_its_place_is_exact_but_keeps_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent fall-back cannot be seen in the law, only in the count: 11/9 drafts of the toy become 10/9."""
    p, q = toy()
    settings: dict[str, Any] = {"p": p, "q": q, "prompt": (0, 1)}
    assert mean_accepted(2, request=PLAIN, **settings) == pytest.approx(10 / 9, abs=EXACT)
    assert mean_accepted(2, request=BLOCK, **settings) == pytest.approx(11 / 9, abs=EXACT)
    monkeypatch.setitem(RULES, "block", token_rule)
    assert law_error(2, 3, request=BLOCK) < EXACT
    assert mean_accepted(2, request=BLOCK, **settings) == pytest.approx(10 / 9, abs=EXACT)


def test_the_engine_keeps_at_least_as_many_drafts_by_the_block_rule() -> None:
    gains = []
    for seed in range(10):
        settings: dict[str, Any] = {"p": table(seed, 2), "q": table(seed + 100, 2), "prompt": (1, 0)}
        for drafts in (1, 2, 3):
            by_block, by_token = (mean_accepted(drafts, request=asked, **settings) for asked in (BLOCK, PLAIN))
            if drafts == 1:
                assert by_block == pytest.approx(by_token, abs=EXACT)
            gains.append(by_block - by_token)
    assert min(gains) > -EXACT
    assert max(gains) > 0.01
