"""The acceptance rules as pure functions: identities, ragged rows, numerics, and the law of one verification.

Statistical checks state their false-alarm rate; the draws are seeded.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtp.errors import UserError
from mtp.sampling import RandomSource
from mtp.verify import RULES, Verdict, verify
from tests.decode.toys import Draws


def laws(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * 1.5).softmax(dim=-1)


def draw(q: Tensor, random: RandomSource) -> Tensor:
    return random.categorical(q)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 4), drafts=st.integers(1, 4), vocab=st.integers(1, 6))
def test_equal_laws_accept_everything(seed: int, batch: int, drafts: int, vocab: int) -> None:
    p, random = laws(seed, batch, drafts + 1, vocab), RandomSource(seed)
    q = p[:, :-1]
    for rule in ("token", "block"):
        verdict = verify(rule, draw(q, random), q, p, random)
        assert verdict.num_accepted.tolist() == [drafts] * batch
        assert not verdict.residual_empty.any()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 4), drafts=st.integers(1, 4), vocab=st.integers(2, 6))
def test_disjoint_supports_accept_nothing(seed: int, batch: int, drafts: int, vocab: int) -> None:
    random = RandomSource(seed)
    p, q = laws(seed, batch, drafts + 1, vocab), laws(seed + 1, batch, drafts, vocab)
    p[..., 0], q[..., 1:] = 0, 0
    for rule in ("token", "block", "match", "lossy-typical"):
        verdict = verify(rule, draw(q, random), q, p, random)
        assert verdict.num_accepted.tolist() == [0] * batch
        assert (p[:, 0].gather(1, verdict.next_token[:, None]) > 0).all()


@settings(deadline=None, max_examples=60)
@given(data=st.data(), seed=st.integers(0, 10_000))
@pytest.mark.parametrize("rule", sorted(RULES))
def test_verdict_is_always_possible(rule: str, data: st.DataObject, seed: int) -> None:
    """Whatever the laws, ragged lengths included: accepted within length, next token possible under p."""
    batch, drafts, vocab = (data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, drafts), min_size=batch, max_size=batch)))
    random = RandomSource(seed)
    p, q = laws(seed, batch, drafts + 1, vocab), laws(seed + 1, batch, drafts, vocab)
    p = torch.where(p < p.amax(-1, keepdim=True) / 3, 0.0, p)
    tokens = draw(q, random)
    verdict = verify(rule, tokens, q, p / p.sum(-1, keepdim=True), random, lengths)
    for row in range(batch):
        accepted, token = int(verdict.num_accepted[row]), int(verdict.next_token[row])
        assert 0 <= accepted <= lengths[row]
        assert p[row, accepted, token] > 0
        for k in range(accepted):
            assert p[row, k, tokens[row, k]] > 0


def test_uniform_over_ten_tokens_is_accepted_always() -> None:
    """If q were lost on the way, acceptance would be the chance of agreeing, 0.1."""
    count = 2_000
    p = torch.full((count, 2, 10), 0.1)
    random = RandomSource(0)
    q = p[:, :1]
    accepted = verify("token", draw(q, random), q, p, random).num_accepted.double().mean()
    assert accepted == 1.0
    one_hot = torch.nn.functional.one_hot(draw(q, random), 10).float()
    lost = verify("token", one_hot.argmax(-1), one_hot, p, random).num_accepted.double().mean()
    assert lost == pytest.approx(0.1, abs=0.03)  # the negative control; 0.03 is 4.5 standard deviations


def test_bonus_comes_from_the_row_after_the_last_draft() -> None:
    """A base that counts 0, 1, 2, …: any other row would repeat or skip."""
    p = torch.eye(5)[None]
    for drafts in range(5):
        tokens = torch.arange(drafts)[None]
        for rule in RULES:
            verdict = verify(rule, tokens, p[:, :drafts], p[:, : drafts + 1], RandomSource(0))
            assert (int(verdict.num_accepted), int(verdict.next_token)) == (drafts, drafts)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_recovered_token_follows_the_residual_of_its_own_row(rule: str) -> None:
    p = torch.tensor([[[1.0, 0, 0], [0, 0.5, 0.5], [0, 0, 1.0]]])
    q = torch.tensor([[[1.0, 0, 0], [0, 1.0, 0]]])
    for seed in range(20):
        verdict = verify(rule, torch.tensor([[0, 1]]), q, p, RandomSource(seed))
        assert (int(verdict.num_accepted), int(verdict.next_token)) in {(1, 2), (2, 2)}


def test_ragged_rows_equal_single_rows() -> None:
    """Three rows with forced acceptance 0, 1 and K, and lengths of their own."""
    drafts, vocab = 3, 4
    q = torch.eye(vocab)[torch.tensor([[0, 1, 2]] * 4)]
    p = torch.eye(vocab)[torch.tensor([[3, 1, 2, 3], [0, 3, 2, 3], [0, 1, 2, 3], [0, 1, 0, 3]])]
    lengths = torch.tensor([3, 3, 3, 2])
    tokens = torch.tensor([[0, 1, 2]] * 4)
    for rule in RULES:
        together = verify(rule, tokens, q, p, RandomSource(0), lengths)
        assert together.num_accepted.tolist() == [0, 1, 3, 2]
        assert together.next_token.tolist() == [3, 3, 3, 0]
        for row in range(4):
            size = int(lengths[row])
            one = slice(row, row + 1)
            alone = verify(rule, tokens[one, :size], q[one, :size], p[one, : size + 1], RandomSource(1))
            assert int(alone.num_accepted) == together.num_accepted[row]
            assert int(alone.next_token) == together.next_token[row]
    assert drafts == tokens.shape[1]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_forbidden_draft_is_rejected_even_by_a_draw_of_zero(rule: str) -> None:
    p, q = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    tokens = torch.tensor([[0]])
    assert int(verify(rule, tokens, q, p, Draws(0.0)).num_accepted) == 0

    class Lax(Draws):
        def bernoulli(self, prob: Tensor) -> Tensor:
            return self.uniform(prob.shape) <= prob

    assert int(verify(rule, tokens, q, p, Lax(0.0)).num_accepted) == 1  # the mutant `<=` emits an impossible token


@pytest.mark.parametrize("rule", ["token", "block"])
def test_small_probabilities_keep_their_ratio(rule: str) -> None:
    """p = 1e-9 against q = 1e-3 is accepted once in a million, not never and not always."""
    p = torch.tensor([[[1e-9, 1.0], [0.5, 0.5]]])
    q = torch.tensor([[[1e-3, 1.0]]])
    tokens = torch.tensor([[0]])
    assert int(verify(rule, tokens, q, p, Draws(0.9e-6)).num_accepted) == 1
    assert int(verify(rule, tokens, q, p, Draws(1.1e-6)).num_accepted) == 0


@pytest.mark.parametrize("rule", ["token", "block"])
def test_empty_residual_falls_back_to_p_and_is_reported(rule: str) -> None:
    """Rounding can leave p <= q everywhere while the draw still rejects; nothing impossible may come out."""
    q = torch.tensor([[[0.6, 0.4, 0.0]]])
    p = torch.tensor([[[0.59, 0.4, 0.0], [1.0, 0.0, 0.0]]])
    verdict = verify(rule, torch.tensor([[0]]), q, p, Draws(1 - 2.0**-53))
    assert int(verdict.num_accepted) == 0
    assert bool(verdict.residual_empty)
    assert int(verdict.next_token) in (0, 1)
    ordinary = verify(rule, torch.tensor([[0]]), q, p, Draws(0.5))
    assert not bool(ordinary.residual_empty)


def test_greedy_keeps_what_equals_the_maximum() -> None:
    p = torch.eye(4)[torch.tensor([[2, 1, 0, 3]])]
    verdict = verify("greedy", torch.tensor([[2, 1, 3]]), torch.zeros(1, 3, 4), p, RandomSource(0))
    assert (int(verdict.num_accepted), int(verdict.next_token)) == (2, 0)


def test_unknown_rule_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="--verify is 'block2'; use one of block, greedy, lossy-typical, match, token"):
        verify("block2", torch.zeros(1, 0).long(), torch.zeros(1, 0, 2), torch.ones(1, 1, 2), RandomSource(0))


# ---- the law of one draft, by sampling ---------------------------------------------------------------------------

COUNT = 400_000
LAW_P, LAW_Q = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
LIMIT = 16.27  # chi-square with 3 degrees of freedom: passed by chance once in 1,000 seeds


def chi_square(seen: Tensor, law: Tensor) -> float:
    expected = law.double() * seen.sum()
    return float((seen - expected).square().div(expected).sum())


def outcome(verdict: Verdict, tokens: Tensor) -> Tensor:
    """Counts [V] of the first committed token."""
    first = torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token)
    return torch.bincount(first, minlength=4).double()


@pytest.mark.parametrize(("rule", "share"), [("token", 0.6), ("block", 0.6), ("match", 0.2)])
def test_one_draft_follows_p(rule: str, share: float) -> None:
    """Kept with chance sum of min(p, q), and by match with sum of p q."""
    p, q = LAW_P.expand(COUNT, 2, 4), LAW_Q.expand(COUNT, 1, 4)
    random = RandomSource(11)
    tokens = draw(q, random)
    verdict = verify(rule, tokens, q, p, random)
    assert 0 < int(verdict.num_accepted.sum()) < COUNT
    assert float(verdict.num_accepted.double().mean()) == pytest.approx(share, abs=0.004)  # 5 sigma
    assert chi_square(outcome(verdict, tokens), LAW_P) < LIMIT


def test_one_draft_with_the_raw_q_does_not_follow_p() -> None:
    """The negative control: drafts cut to the two likeliest tokens, judged by the whole q."""
    random = RandomSource(11)
    cut = torch.tensor([0.4, 0.3, 0.0, 0.0]) / 0.7
    tokens = draw(cut.expand(COUNT, 1, 4), random)
    p, q = LAW_P.expand(COUNT, 2, 4), LAW_Q.expand(COUNT, 1, 4)
    assert chi_square(outcome(verify("token", tokens, q, p, random), tokens), LAW_P) > LIMIT
    honest = verify("token", tokens, cut.expand(COUNT, 1, 4), p, random)
    assert chi_square(outcome(honest, tokens), LAW_P) < LIMIT


def test_argmax_drafts_with_soft_q_do_not_follow_p() -> None:
    """p = q = (.6, .4): a draft that is always the likeliest, judged by the soft q, gives 100 / 0."""
    law = torch.tensor([0.6, 0.4])
    p, soft = law.expand(COUNT, 2, 2), law.expand(COUNT, 1, 2)
    tokens = torch.zeros(COUNT, 1, dtype=torch.long)

    def share(q: Tensor) -> float:
        verdict = verify("token", tokens, q, p, RandomSource(2))
        return float((torch.where(verdict.num_accepted > 0, tokens[:, 0], verdict.next_token) == 0).double().mean())

    assert share(torch.tensor([1.0, 0.0]).expand(COUNT, 1, 2)) == pytest.approx(0.6, abs=0.004)  # 5 sigma
    assert share(soft) == 1.0
