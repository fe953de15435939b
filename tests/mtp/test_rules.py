"""The family of rules: a worked example by hand, laws on random p and q, and closed forms against the real rules."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode.walk import walk
from mtp import rules
from mtp.errors import UserError
from mtp.rules import Study, all_rules, as_law, chain, expected_accepted, matching_resample
from mtp.sampling import RandomSource
from mtp.verify import verify

P, Q = as_law([0.1, 0.2, 0.3, 0.4], "--p"), as_law([0.4, 0.3, 0.2, 0.1], "--q")
BIASED = "resample from p"


def law(seed: int, *shape: int, sharpness: float = 1.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * sharpness).softmax(dim=-1)


def by_name(p: Tensor, q: Tensor, scale: float = 0.5) -> dict[str, Study]:
    return {member.name: member for member in all_rules(p, q, scale)}


# ---- one position --------------------------------------------------------------------------------------------------


def test_the_example_by_hand() -> None:
    members = by_name(P, Q)
    accepts = {name: member.p_accept for name, member in members.items()}
    assert accepts == pytest.approx(
        {
            "residual": 0.6,  # .1 + .2 + .2 + .1
            BIASED: 0.6,
            "resample from p, corrected": 0.25,  # .1 / .4
            "scaled by 0.5": 0.3,
            "match": 0.2,  # .04 + .06 + .06 + .04
            "match, greedy draft": 0.1,  # p of token 0
        },
        abs=1e-15,
    )
    assert members[BIASED].law.tolist() == pytest.approx([0.14, 0.28, 0.32, 0.26], abs=1e-15)
    assert members[BIASED].total_variation == pytest.approx(0.14, abs=1e-15)
    assert rules.best_constant(P, Q) == pytest.approx(0.25, abs=1e-15)
    assert [name for name, member in members.items() if not member.exact] == [BIASED]
    partner = matching_resample(P, Q, rules.keep_ratio(P, Q))
    assert partner.tolist() == pytest.approx([0, 0, 0.25, 0.75], abs=1e-15)


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 100_000), vocab=st.integers(2, 9), scale=st.floats(0, 1), sharpness=st.floats(0.1, 4))
def test_exact_members_give_p_and_the_biased_one_does_not(
    seed: int, vocab: int, scale: float, sharpness: float
) -> None:
    p, q = law(seed, vocab, sharpness=sharpness), law(seed + 1, vocab, sharpness=sharpness)
    for name, member in by_name(p, q, scale).items():
        assert member.exact == (name != BIASED)
        assert float(member.law.sum()) == pytest.approx(1, abs=1e-14)
        if member.exact:
            assert float((member.law - p).abs().max()) < 1e-15
        else:
            by_hand = p.minimum(q) + p * (1 - float(p.minimum(q).sum()))
            assert float((member.law - by_hand).abs().max()) < 1e-15


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 100_000), vocab=st.integers(2, 9))
def test_no_exact_member_keeps_more_than_the_residual(seed: int, vocab: int) -> None:
    p, q = law(seed, vocab), law(seed + 1, vocab)
    members = by_name(p, q)
    best = members["residual"].p_accept
    assert best == pytest.approx(1 - rules.total_variation(p, q), abs=1e-14)
    for name in ("resample from p, corrected", "scaled by 0.5", "match"):
        assert members[name].p_accept <= best + 1e-14


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 100_000), vocab=st.integers(2, 6), data=st.data())
def test_the_partner_of_r_is_the_only_one(seed: int, vocab: int, data: st.DataObject) -> None:
    """Any r <= min(1, p/q) has a partner that keeps p, and any other a moves the law away from it."""
    p, q = law(seed, vocab), law(seed + 1, vocab)
    share = torch.tensor(data.draw(st.lists(st.floats(0, 0.9), min_size=vocab, max_size=vocab)), dtype=torch.float64)
    keep = share * rules.keep_ratio(p, q)
    partner, other = matching_resample(p, q, keep), law(seed + 2, vocab)
    assert rules.study("any", p, q, keep, partner).exact
    moved = rules.study("any", p, q, keep, other)
    expected = rules.total_variation(other, partner) * (1 - moved.p_accept)
    assert moved.total_variation == pytest.approx(expected, abs=1e-14)
    assert not moved.exact


def test_an_r_that_no_partner_can_mend() -> None:
    with pytest.raises(UserError, match=r"at token 0, r = 0\.5 exceeds p / q = 0\.25"):
        matching_resample(P, Q, torch.tensor([0.5, 0.1, 1, 1], dtype=torch.float64))
    with pytest.raises(UserError, match="leaves 0…1"):
        matching_resample(P, Q, torch.tensor([0.1, 0.1, 1.5, 1], dtype=torch.float64))


def test_equal_laws() -> None:
    members = by_name(P, P)
    assert all(member.exact for member in members.values())
    assert [members[name].p_accept for name in ("residual", BIASED, "resample from p, corrected")] == [1, 1, 1]
    assert members["match"].p_accept == pytest.approx(0.3)


def test_disjoint_supports_keep_nothing_and_stay_exact() -> None:
    members = by_name(as_law([0.4, 0.6, 0, 0], "--p"), as_law([0, 0, 0.5, 0.5], "--q"))
    assert all(member.p_accept == 0 and member.exact for member in members.values())


def test_a_draft_vocabulary_that_leaves_out_tokens_of_p() -> None:
    cut = as_law([0.4, 0.6, 0, 0], "--q")
    members = by_name(P, cut)
    assert rules.best_constant(P, cut) == 0
    assert members["resample from p, corrected"].p_accept == 0
    assert members["resample from p, corrected"].exact
    assert members["residual"].p_accept == pytest.approx(0.3)
    assert [name for name, member in members.items() if not member.exact] == [BIASED]


def test_resampling_from_p_is_harmless_only_where_q_is_proportional_to_p() -> None:
    p, q = as_law([0.25, 0.75, 0], "--p"), as_law([0.1, 0.3, 0.6], "--q")
    assert by_name(p, q)[BIASED].exact
    assert not by_name(p, as_law([0.15, 0.25, 0.6], "--q"))[BIASED].exact


def test_the_derivation_has_the_numbers() -> None:
    lines = rules.derivation(P, Q, lambda token: f"<{token}>")
    assert "Σ min(p, q) = 0.6 " in lines[0]
    assert "at y = <3>: 0.1 + 0.4 · 0.4 = 0.26, where p has 0.4" in lines[2]
    assert "A* = min q/p = 0.25" in lines[3]
    assert "(0, 0, 0.25, 0.75), not p" in lines[4]
    assert "none is rejected" in rules.derivation(P, P)[4]
    assert "largest at 4, 1," in rules.derivation(torch.eye(9)[4].double(), torch.eye(9)[5].double())[4]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], "--p has 1 number"),
        ([0.5, 0.4], "--p sums to 0.9"),
        ([0.5, 0.500002], "--p sums to 1"),
        ([0.0, 0.0], "--p sums to 0"),
        ([1.5, -0.5], r"--p has -0\.5 at place 2"),
        ([float("nan"), 1.0], "--p has nan at place 1"),
        ([float("inf"), 1.0], "--p has inf at place 1"),
    ],
)
def test_what_is_no_law(values: list[float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_law(values, "--p")


def test_rounded_numbers_are_normalised() -> None:
    assert float(as_law([0.3333333, 0.3333333, 0.3333333], "--p").sum()) == pytest.approx(1, abs=1e-15)


@pytest.mark.parametrize("scale", [-0.1, 1.1, float("nan")])
def test_scale_is_a_share(scale: float) -> None:
    with pytest.raises(UserError, match="--scale is"):
        rules.scaled(P, Q, scale)


# ---- several drafts ------------------------------------------------------------------------------------------------


def test_the_known_toy() -> None:
    toy = chain(as_law([1 / 3, 2 / 3], "--p"), as_law([2 / 3, 1 / 3], "--q"), 2)
    assert toy.token == pytest.approx(10 / 9, abs=1e-15)
    assert toy.block == pytest.approx(11 / 9, abs=1e-15)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 100_000), vocab=st.integers(2, 5), drafts=st.integers(1, 4), rows=st.booleans())
def test_block_keeps_at_least_as_many_and_both_follow_p(seed: int, vocab: int, drafts: int, rows: bool) -> None:
    shape = (drafts, vocab) if rows else (vocab,)
    p, q = law(seed, *shape), law(seed + 1, *shape)
    both = chain(p, q, drafts)
    alphas = p.minimum(q).sum(dim=-1).expand(drafts)
    assert both.token == pytest.approx(float(alphas.cumprod(dim=0).sum()), abs=1e-12)
    assert both.block >= both.token - 1e-12
    if drafts == 1:
        assert both.block == pytest.approx(both.token, abs=1e-12)
    assert max(both.variations) < 1e-13
    for first in both.first_laws:
        assert float((first - p.expand(drafts, vocab)[0]).abs().max()) < 1e-13


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", ["token", "block"])
def test_closed_forms_against_the_real_rules(rule: str, seed: int) -> None:
    """Every outcome of `mtp.verify`, drafts included, gives the same expectation and the same first token."""
    drafts, vocab = 2, 3
    p, q = law(seed, drafts, vocab), law(seed + 10, drafts, vocab)
    p_rows = torch.cat([p, p[-1:]])[None]

    def once(random: RandomSource) -> tuple[int, ...]:
        tokens = random.categorical(q[None])
        verdict = verify(rule, tokens, q[None], p_rows, random)
        accepted = int(verdict.num_accepted)
        return (accepted, int(tokens[0, 0]) if accepted else int(verdict.next_token))

    outcomes, both = walk(once), chain(p, q, drafts)
    expected = sum(accepted * chance for (accepted, _), chance in outcomes.items())
    first = [sum(chance for (_, token), chance in outcomes.items() if token == y) for y in range(vocab)]
    place = 0 if rule == "token" else 1
    assert (both.token, both.block)[place] == pytest.approx(expected, abs=1e-12)
    assert both.first_laws[place].tolist() == pytest.approx(first, abs=1e-12)


def test_a_wrong_residual_would_be_seen() -> None:
    """The negative control: the token residual after block acceptance bends the law, and `variations` says so."""
    p, q = law(3, 2, 4), law(4, 2, 4)
    tally = rules._Tally(p, q)
    for tokens, mass in rules._all_drafts(q):
        size = len(tokens)
        p_rows, q_rows = torch.cat([p, p[-1:]]).expand(size, -1, -1), q.expand(size, -1, -1)
        weights, thresholds = rules.block_thresholds(tokens, q_rows, p_rows, torch.full((size,), 2))
        tally.add(tokens, mass, rules.block_survival(thresholds), torch.ones_like(weights))
    assert rules.total_variation(tally.law, rules._outer(list(p))) > 1e-3


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_estimates_from_drafts_are_unbiased(drafts: int) -> None:
    """Averaged over all drafts they are the closed forms; and no draft is needed to know K = 1."""
    vocab = 3
    p, q = law(1, drafts + 1, vocab), law(2, drafts, vocab)
    tokens = torch.tensor(list(product(range(vocab), repeat=drafts)))
    mass = torch.stack([q[k, tokens[:, k]] for k in range(drafts)]).prod(dim=0)
    estimates = expected_accepted(tokens, q.expand(len(tokens), -1, -1), p.expand(len(tokens), -1, -1))
    exact = chain(p[:drafts], q, drafts)
    assert [float((mass * values).sum()) for values in estimates] == pytest.approx([exact.token, exact.block])
    if drafts == 1:
        assert estimates[0].tolist() == pytest.approx([exact.token] * vocab)


def test_chain_knows_its_limits() -> None:
    for drafts, vocab in ((0, 3), (2, 448), (18, 2)):
        with pytest.raises(UserError, match=f"K = {drafts} with V = {vocab}"):
            chain(law(0, vocab), law(1, vocab), drafts)


@pytest.mark.parametrize("of", [lambda p, q: (p, p), lambda p, q: (q, p)])
def test_chain_of_equal_and_of_foreign_laws(of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    p, q = of(as_law([0.5, 0.5, 0, 0], "--p"), as_law([0, 0, 0.3, 0.7], "--q"))
    both = chain(p, q, 3)
    kept = 3 if torch.equal(p, q) else 0
    assert (both.token, both.block) == pytest.approx((kept, kept))
    assert max(both.variations) < 1e-15
