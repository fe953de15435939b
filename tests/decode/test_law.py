"""The law of the engine's text over chains, by walking every outcome, and the faults in drawing that it must expose.

The other files: rows that are no laws and draws at their ends (`test_law_rows`), settings (`test_law_settings`),
adaptive draft length (`test_law_adaptive`), the block rule (`test_law_block`), trees (`test_law_trees`), and a list of
all mutants (`test_law_mutants`).
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from decode import chain as chain_module
from decode.laws import Laws
from decode.request import Request
from mtp import verify as verify_module
from mtp.sampling import RandomSource, to_probs
from mtp.verify import Verdict, at_row, at_tokens, leading, token_residual, token_rule
from tests.decode.laws import BLOCK, CHAIN_RULES, EXACT, P2, PLAIN, Q2, P, Q, law_error, sparse, walk_engine

pytestmark = pytest.mark.usefixtures("one_thread")
JUDGING = ["token", "block"]  # the rules that look at q


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize(
    ("draft_length", "new_tokens", "prompt"),
    [
        (1, 3, (1, 2)),
        (1, 3, (1,)),
        (2, 3, (1, 2)),
        (2, 3, (2,)),
        (3, 2, (0, 1)),
        (3, 3, (2, 0)),
        (3, 3, (1, 0, 2, 2)),
    ],
)
def test_law_equals_base(rule: str, draft_length: int, new_tokens: int, prompt: tuple[int, ...]) -> None:
    """One to four steps, one-token prompts, and K cut near the end."""
    assert law_error(draft_length, new_tokens, prompt=prompt, request=CHAIN_RULES[rule]) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
def test_law_equals_base_with_all_drafts_over_two_steps(rule: str) -> None:
    never = [(a, b, (a + b) % 3) for a in range(3) for b in range(3)]
    q = sparse(Q, *[(a, b, (token + 1) % 3) for a, b, token in never])
    assert law_error(2, 3 if rule == "token" else 4, p=sparse(P, *never), q=q, request=CHAIN_RULES[rule]) < EXACT
    assert law_error(2, 5, p=P2, q=Q2, prompt=(0, 1), request=CHAIN_RULES[rule]) < EXACT
    if rule == "block":
        assert law_error(3, 5, p=P2, q=Q2, prompt=(0, 1), request=CHAIN_RULES[rule]) < EXACT


@pytest.mark.parametrize(
    ("draft_length", "new_tokens", "vocab"), [(1, 2, 3), (1, 3, 2), (2, 2, 3), (2, 3, 2), (3, 3, 2)]
)
def test_law_of_match_equals_base(draft_length: int, new_tokens: int, vocab: int) -> None:
    """Match draws K + 1 rows at once, so its walks are kept small."""
    p, q = (P, Q) if vocab == 3 else (P2, Q2)
    for prompt in ((1, 0), (1,)):
        if draft_length < new_tokens - 1 or len(prompt) > 1:  # else the only step with drafts has no anchor
            assert law_error(draft_length, new_tokens, p=p, q=q, prompt=prompt, request=CHAIN_RULES["match"]) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("eos", [(1,), (0, 2)])
def test_law_with_end_of_sequence_inside_blocks(rule: str, eos: tuple[int, ...]) -> None:
    assert law_error(2, 3, eos=eos, request=CHAIN_RULES[rule]) < EXACT
    if len(eos) == 1:
        assert law_error(3, 4, p=P2, q=Q2, prompt=(0, 1), eos=eos, request=CHAIN_RULES[rule]) < EXACT


def test_law_of_match_with_end_of_sequence_inside_blocks() -> None:
    assert law_error(2, 3, p=P2, q=Q2, prompt=(0, 1), eos=(1,), request=CHAIN_RULES["match"]) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("ids", [[2, 0], [1]])
def test_law_with_a_draft_vocabulary(rule: str, ids: list[int]) -> None:
    assert law_error(2, 3, draft_ids=torch.tensor(ids), request=CHAIN_RULES[rule]) < EXACT


def test_law_of_match_with_a_draft_vocabulary() -> None:
    assert law_error(1, 3, draft_ids=torch.tensor([2]), request=CHAIN_RULES["match"]) < EXACT


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("heat", [0.0, 0.4, 2.5])
def test_law_does_not_depend_on_the_draft_temperature(rule: str, heat: float) -> None:
    """At 0, q is one-hot: the likeliest draft, judged by the law it was drawn from."""
    request = Request(temperature=1.0, verify=rule, draft_temperature=heat)
    assert law_error(2, 3, request=request) < EXACT
    assert law_error(3, 4, p=P2, q=Q2, prompt=(0, 1), request=request) < EXACT


def test_law_of_match_does_not_depend_on_the_draft_temperature() -> None:
    """One-hot q costs no branches, so two steps at V = 3 can be walked."""
    assert law_error(2, 3, request=Request(temperature=1.0, verify="match", draft_temperature=0.0)) < EXACT
    assert law_error(1, 2, request=Request(temperature=1.0, verify="match", draft_temperature=2.5)) < EXACT


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_nothing_is_accepted_when_the_supports_are_disjoint(rule: str) -> None:
    p, q = P.clone(), Q.clone()
    p[..., 0], q[..., 1:] = -torch.inf, -torch.inf
    walked = walk_engine(2, 3, p=p, q=q, request=CHAIN_RULES[rule])
    assert walked.error < EXACT
    assert walked.accepted == 0 < walked.drafted


@pytest.mark.parametrize("rule", JUDGING)
def test_everything_is_accepted_when_the_laws_are_equal(rule: str) -> None:
    walked = walk_engine(2, 4, q=P, request=CHAIN_RULES[rule])
    assert walked.error < EXACT
    assert walked.accepted == walked.drafted > 0
    assert walked.residual_empty == 0


# ---- mutants -----------------------------------------------------------------------------------------------------


def raw_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts come from the processed q, and are judged by the raw one."""

    def raw(self: Laws, logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        return logits.softmax(dim=-1), torch.ones(len(logits), dtype=torch.bool)

    def processed(q: Tensor, request: Request, random: RandomSource) -> Tensor:
        return random.categorical(to_probs(q.log(), request))

    monkeypatch.setattr(Laws, "q", raw)
    monkeypatch.setattr(chain_module, "propose", processed)


def argmax_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are the likeliest tokens, and are judged by the soft q."""
    monkeypatch.setattr(chain_module, "propose", lambda q, request, random: q.argmax(dim=-1))


def draft_at_the_temperature_of_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts ignore the draft temperature by which they are judged."""
    monkeypatch.setattr(
        chain_module,
        "propose",
        lambda q, request, random: random.categorical(to_probs(q.log() * request.draft_temperature, request)),
    )


@pytest.mark.parametrize("rule", JUDGING)
@pytest.mark.parametrize("mutant", [raw_q, argmax_draft, draft_at_the_temperature_of_p])
def test_wrong_proposal_is_exposed(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[[pytest.MonkeyPatch], None], rule: str
) -> None:
    request = Request(verify=rule, temperature=1.0, top_k=2)
    if mutant is draft_at_the_temperature_of_p:
        request = Request(verify=rule, temperature=1.0, draft_temperature=2.0)
    assert law_error(2, 3, request=request) < EXACT
    mutant(monkeypatch)
    assert law_error(2, 3, request=request) > 0.01


def _with_residual(weights: object) -> verify_module.Rule:
    """The token rule with another law for the recovered token: weights(p_row, q_row)."""

    def rule(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
        if not q.shape[1]:
            return token_rule(tokens, q, p, random, lengths)
        ratio = at_tokens(p[:, :-1], tokens) / at_tokens(q, tokens)
        accepted = leading(random.bernoulli(ratio.clamp(max=1)), lengths)
        p_row, q_row = at_row(p, accepted), at_row(q, accepted.clamp(max=q.shape[1] - 1))
        row = torch.where((accepted < lengths)[:, None], weights(p_row, q_row), p_row)  # type: ignore[operator]
        return Verdict(accepted, random.categorical(row), accepted < 0)

    return rule


correct_residual = _with_residual(lambda p, q: (p - q).relu())
resample_from_p = _with_residual(lambda p, q: p)
softmax_of_residual = _with_residual(lambda p, q: (p - q).relu().softmax(dim=-1))
floor_on_residual = _with_residual(lambda p, q: (p - q).relu().clamp(min=1e-9))


def off_by_one_bonus(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """After a full accept, the row of the last draft in place of the one after it."""
    rows = p.clone()
    if tokens.shape[1]:
        rows[:, -1] = p[:, -2]
    return token_rule(tokens, q, rows, random, lengths)


def match_draws_again(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """After a mismatch, a new draw in place of the one that did not match."""
    verdict = verify_module.match_rule(tokens, q, p, random, lengths)
    return Verdict(verdict.num_accepted, random.categorical(at_row(p, verdict.num_accepted)), verdict.residual_empty)


def test_the_rebuilt_rule_itself_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the residual mutants fail by is the residual."""
    monkeypatch.setitem(verify_module.RULES, "token", correct_residual)
    assert law_error(2, 3) < EXACT


@pytest.mark.parametrize(
    ("mutant", "at_least"),
    [
        pytest.param(resample_from_p, 0.01, id="resample_from_p"),
        pytest.param(softmax_of_residual, 0.01, id="softmax_of_residual"),
        pytest.param(floor_on_residual, 100 * EXACT, id="floor_on_residual"),
        pytest.param(off_by_one_bonus, 0.01, id="off_by_one_bonus"),
    ],
)
def test_wrong_rule_is_exposed(monkeypatch: pytest.MonkeyPatch, mutant: verify_module.Rule, at_least: float) -> None:
    monkeypatch.setitem(verify_module.RULES, "token", mutant)
    assert law_error(2, 3, request=PLAIN) > at_least


def test_drawing_again_after_a_mismatch_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verify_module.RULES, "match", match_draws_again)
    assert law_error(1, 2, request=CHAIN_RULES["match"]) > 0.01


def test_a_mutant_that_no_request_asks_for_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the controls: the rules are looked up by name."""
    monkeypatch.setitem(verify_module.RULES, "token", resample_from_p)
    assert law_error(2, 3, request=BLOCK) < EXACT


def test_residual_helper_keeps_forbidden_tokens_impossible() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.2, 0.3, 0.5]]])
    residual, empty = token_residual(q, p, torch.tensor([0]), torch.tensor([1]))
    assert residual[0, 2] == 0
    assert not empty.any()
