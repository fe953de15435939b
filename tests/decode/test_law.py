"""The engine's output law, by walking every outcome of its draws on a table-driven base, and the faults it must expose.

Every mutant runs through the very check that the engine passes (`law_error`) and must fail it by a margin.
"""

import pytest
import torch
from torch import Tensor

from decode import engine as engine_module
from decode.engine import Engine
from decode.request import Request
from mtp import verify as verify_module
from mtp.sampling import RandomSource, to_probs
from mtp.verify import Verdict, at_row, at_tokens, leading, token_residual, token_rule
from tests.decode.toys import PLAIN, TableDrafter, TableTarget, decode, table, total_variation, true_law, walk

pytestmark = pytest.mark.usefixtures("one_thread")
EXACT = 1e-12
P, Q = table(0), table(1)


def law_error(
    draft_length: int,
    new_tokens: int,
    *,
    p: Tensor = P,
    q: Tensor = Q,
    prompt: tuple[int, ...] = (1, 2),
    request: Request = PLAIN,
    draft_ids: Tensor | None = None,
    eos: tuple[int, ...] = (),
) -> float:
    """Total variation between the law of the engine's text and the product of p's conditionals."""
    seen = {"drafted": 0, "accepted": 0, "runs": 0}

    def run(random: RandomSource) -> tuple[int, ...]:
        engine = Engine(TableTarget(p), TableDrafter(q, draft_ids=draft_ids))
        tokens, stats = decode(
            engine, list(prompt), new_tokens, draft_length, request=request, random=random, eos=eos
        )
        assert stats.committed == len(tokens)
        seen["drafted"] += stats.drafted
        seen["accepted"] += stats.accepted
        seen["runs"] += 1
        return tokens

    law = walk(run)
    assert 0 < seen["accepted"] < seen["drafted"], "a check in which nothing was accepted or rejected proves nothing"
    assert abs(sum(law.values()) - 1) < EXACT
    return total_variation(law, true_law(to_probs(p, request), list(prompt), new_tokens, eos))


def sparse(logits: Tensor, *cells: tuple[int, int, int]) -> Tensor:
    """`logits` with some tokens made impossible."""
    logits = logits.clone()
    for cell in cells:
        logits[cell] = -torch.inf
    return logits


@pytest.mark.parametrize(
    ("draft_length", "new_tokens", "prompt"),
    [(1, 3, (1, 2)), (1, 3, (1,)), (2, 3, (1, 2)), (2, 3, (2,)), (3, 2, (0, 1)), (3, 3, (2, 0))],
)
def test_law_equals_base(draft_length: int, new_tokens: int, prompt: tuple[int, ...]) -> None:
    """Two or more steps, one-token prompts, and K cut near the end."""
    assert law_error(draft_length, new_tokens, prompt=prompt) < EXACT


def test_law_equals_base_with_three_drafts_over_two_steps() -> None:
    never = [(a, b, (a + b) % 3) for a in range(3) for b in range(3)]
    q = sparse(Q, *[(a, b, (token + 1) % 3) for a, b, token in never])
    assert law_error(3, 4, p=sparse(P, *never), q=q) < EXACT


def test_law_with_end_of_sequence_inside_blocks() -> None:
    assert law_error(2, 3, eos=(1,)) < EXACT


def test_law_with_a_draft_vocabulary() -> None:
    assert law_error(2, 3, draft_ids=torch.tensor([2, 0])) < EXACT


@pytest.mark.parametrize(
    "sampling",
    [
        Request(verify="token", temperature=0.6),
        Request(verify="token", temperature=1.3, top_k=2),
        Request(verify="token", temperature=1.0, top_p=0.8),
        Request(verify="token", temperature=1.0, min_p=0.4),
    ],
)
def test_law_with_processors(sampling: SamplingConfig) -> None:
    assert law_error(2, 3, sampling=sampling) < EXACT


# ---- mutants -----------------------------------------------------------------------------------------------------


def raw_q(logits: Tensor, sampling: SamplingConfig, random: RandomSource) -> tuple[Tensor, Tensor]:
    return random.categorical(to_probs(logits, sampling)), logits.softmax(dim=-1)


def argmax_draft(logits: Tensor, sampling: SamplingConfig, random: RandomSource) -> tuple[Tensor, Tensor]:
    q = to_probs(logits, sampling)
    return q.argmax(dim=-1), q


@pytest.mark.parametrize("mutant", [raw_q, argmax_draft])
def test_wrong_proposal_is_exposed(monkeypatch: pytest.MonkeyPatch, mutant: object) -> None:
    sampling = Request(verify="token", temperature=1.0, top_k=2)
    assert law_error(2, 3, sampling=sampling) < EXACT
    monkeypatch.setattr(engine_module, "propose", mutant)
    assert law_error(2, 3, sampling=sampling) > 0.01


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


def discard_low_confidence(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Throw a sampled draft away because its q is low."""
    lengths = lengths.minimum(leading(at_tokens(q, tokens) > 0.3, lengths))
    return token_rule(tokens, q, p, random, lengths)


def test_the_rebuilt_rule_itself_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the residual mutants fail by is the residual."""
    monkeypatch.setitem(verify_module.RULES, "token", correct_residual)
    assert law_error(2, 3) < EXACT


@pytest.mark.parametrize(
    ("mutant", "at_least"),
    [
        (resample_from_p, 0.01),
        (softmax_of_residual, 0.01),
        (floor_on_residual, 100 * EXACT),
        (off_by_one_bonus, 0.01),
        (discard_low_confidence, 0.01),
    ],
    ids=["resample_from_p", "softmax_of_residual", "floor_on_residual", "off_by_one_bonus", "discard_low_confidence"],
)
def test_wrong_rule_is_exposed(monkeypatch: pytest.MonkeyPatch, mutant: verify_module.Rule, at_least: float) -> None:
    monkeypatch.setitem(verify_module.RULES, "token", mutant)
    assert law_error(2, 3) > at_least


def test_dropping_all_drafts_of_a_step_for_a_later_bad_row_is_exposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of q that is NaN after some first drafts: keeping the drafts before it is exact, dropping them is not."""
    q = Q.clone()
    q[2, 0] = torch.nan  # the second draft has no law when the first, after 1 2, was 0
    assert law_error(2, 3, q=q) < EXACT

    def all_or_nothing(tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
        return token_rule(tokens, q, p, random, torch.where(lengths < tokens.shape[1], 0, lengths))

    monkeypatch.setitem(verify_module.RULES, "token", all_or_nothing)
    assert law_error(2, 3, q=q) > 0.01


def test_residual_helper_keeps_forbidden_tokens_impossible() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    q = torch.tensor([[[0.2, 0.3, 0.5]]])
    residual, empty = token_residual(q, p, torch.tensor([0]), torch.tensor([1]))
    assert residual[0, 2] == 0
    assert not empty.any()
