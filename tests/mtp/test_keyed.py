"""Keyed draws: a function of (seed, position) and nothing else, whose law is that of the row that is drawn from."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from decode.chi_square import chi_square
from mtp import keyed
from mtp.errors import UserError
from mtp.keyed import KeyedSource, exponentials, race_gap
from mtp.verify import verify

FALSE_ALARM = 1e-4
"""Chance that a chi-square test below fails on draws that are right, over seeds; the seeds are fixed."""
COUNT = 20_000
LIMIT = 5.0  # |z| of one comparison; passed by chance once in 1.7 million


def laws(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).softmax(dim=-1)


# ---- exponentials ------------------------------------------------------------------------------------------------


def test_exponentials_depend_on_seed_and_position_only() -> None:
    expected = exponentials(3, 17, 50)
    exponentials(4, 17, 50)
    np.random.seed(0)
    torch.manual_seed(0)
    assert (exponentials(3, 17, 50) == expected).all()
    assert (exponentials(3, 17, 9) == expected[:9]).all()  # nor on the size of the vocabulary


def test_neighbours_and_large_seeds_have_streams_of_their_own() -> None:
    """Also seeds that agree in their low or high 32 bits, and a seed and position that change places."""
    seeds = [0, 1, 2, 3, 2**31, 2**32, 2**32 + 1, 2**33, 2**62, 2**63 - 2, 2**63 - 1]
    keys = [(seed, position) for seed in seeds for position in [*range(8), 2**20, 2**32, 2**40]]
    assert len({exponentials(*key, 2).tobytes() for key in keys}) == len(keys)


def test_streams_do_not_overlap_shifted() -> None:
    """A position's numbers are not a later part of its neighbour's, as they would be with a counter that runs on."""
    numbers = [number for position in range(64) for number in exponentials(5, position, 500).tolist()]
    assert len(set(numbers)) == len(numbers)


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In standard deviations of what independent samples give: |z| has a half-normal law, whatever the sample's own."""
    return abs(float(np.corrcoef(a, b)[0, 1])) * math.sqrt(len(a))


def test_streams_are_uncorrelated() -> None:
    """60 comparisons against LIMIT: a false alarm once in 28,000 choices of seeds."""
    by_position = [exponentials(9, position, COUNT) for position in range(31)]
    by_seed = [exponentials(seed, 9, COUNT) for seed in range(31)]
    for streams in (by_position, by_seed):
        assert max(correlation(a, b) for a, b in pairwise(streams)) < LIMIT
    # Also along positions and along seeds, for the very first token.
    along = np.array([exponentials(1, position, 1)[0] for position in range(COUNT)])
    across = np.array([exponentials(seed, 1, 1)[0] for seed in range(COUNT)])
    for series in (along, across):
        assert correlation(series[:-1], series[1:]) < LIMIT
    assert correlation(along, across) < LIMIT


def test_correlation_finds_a_stream_that_is_partly_shared() -> None:
    """The negative control: one number in ten is the neighbour's."""
    ours, theirs = exponentials(9, 0, COUNT), exponentials(9, 1, COUNT)
    theirs[::10] = ours[::10]
    assert correlation(ours, theirs) > LIMIT


def test_their_law_is_the_exponential() -> None:
    """Kolmogorov-Smirnov: sqrt(n) D exceeds 2.3 by chance once in 20,000 seeds."""
    values = np.sort(
        np.concatenate([exponentials(seed, position, 500) for seed in range(20) for position in range(20)])
    )
    count = len(values)
    law = 1 - np.exp(-values)
    ranks = np.arange(count)
    distance = max((law - ranks / count).max(), ((ranks + 1) / count - law).max())
    assert distance * math.sqrt(count) < 2.3
    assert values[0] > 0
    assert np.isfinite(values[-1])


class Extreme:
    """In place of Philox: the smallest and the largest integers it can give."""

    def __init__(self, **_: object) -> None:
        pass

    def random_raw(self, count: int) -> np.ndarray:
        return np.array([0, 1, 2**11, 2**63, 2**64 - 2**12, 2**64 - 2**11, 2**64 - 1][:count], dtype=np.uint64)


def test_no_integer_gives_zero_or_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in 2**53 numbers; then p / E is -inf for the token, and NaN, which argmax prefers, if its p is 0."""
    monkeypatch.setattr(keyed.np.random, "Philox", Extreme)
    values = exponentials(0, 0, 7)
    assert np.isfinite(values).all()
    assert (values > 0).all()


# ---- categorical -------------------------------------------------------------------------------------------------


def test_shapes_and_positions() -> None:
    """[V], [B, V] and [B, K, V]: K positions in a row are K draws, and the first to arrive in the race wins."""
    p = laws(2, 4, 7)
    expected = torch.tensor(
        [
            [int((torch.from_numpy(exponentials(seed, start + k, 7)) / p[row, k]).argmin()) for k in range(4)]
            for row, (seed, start) in enumerate([(5, 10), (6, 30)])
        ]
    )
    source = KeyedSource(5, 6)
    source.seek(10, 30)
    assert torch.equal(source.categorical(p), expected)  # [B, K, V]
    source.seek(10, 30)
    assert torch.equal(torch.stack([source.categorical(p[:, k]) for k in range(4)], dim=1), expected)  # [B, V]
    source.seek(10, 30)
    assert torch.equal(torch.cat([source.categorical(p[:, :3]), source.categorical(p[:, 3:])], dim=1), expected)
    one = KeyedSource(5)
    one.seek(10)
    draws = [one.categorical(p[0, k]) for k in range(4)]  # [V]
    assert [draw.shape for draw in draws] == [torch.Size([])] * 4
    assert [int(draw) for draw in draws] == expected[0].tolist()


def test_draft_and_verification_share_the_noise_of_a_position() -> None:
    """Seeking back gives the same draws again, whatever was drawn between, and a start without seek is position 0."""
    p = laws(1, 5, 9)
    source = KeyedSource(2)
    first = source.categorical(p)
    source.categorical(laws(1, 3, 9, seed=1))
    source.seek(0)
    assert torch.equal(source.categorical(p), first)
    source.seek(3)
    assert torch.equal(source.categorical(p[:, 3:]), first[:, 3:])
    source.seek(1)  # back behind what is kept
    assert torch.equal(source.categorical(p[:, 1:]), first[:, 1:])


def test_kept_noise_does_not_grow_with_the_text() -> None:
    source = KeyedSource(0)
    for position in range(0, 300, 3):
        source.seek(position)
        source.categorical(laws(1, 4, 6))
    assert len(source._noise) <= 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_of_probability_zero_is_never_drawn(dtype: torch.dtype) -> None:
    p = laws(500, 6, seed=3).to(dtype)
    p[torch.rand(500, 6, generator=torch.Generator().manual_seed(4)) < 0.6] = 0.0
    p[:3] = torch.tensor([0, 0, 0, 0, 0, 1e-30])
    source = KeyedSource(1)
    draws = source.categorical(p[None])[0]
    alive = p.sum(dim=-1) > 0
    assert 20 > (~alive).sum() > 5
    assert (p[torch.arange(500), draws][alive] > 0).all()
    assert draws[:3].tolist() == [5, 5, 5]
    assert (draws[~alive] == 0).all()  # a row without mass


def test_unnormalised_rows_and_lower_precision_draw_alike() -> None:
    p = laws(1, 200, 6)
    for other in (p * 7.5, p * 1e-200, p.float()):
        assert torch.equal(KeyedSource(8).categorical(other), KeyedSource(8).categorical(p))


@pytest.mark.parametrize("rule", [None, "match"])
def test_each_row_of_a_batch_gets_what_it_gets_alone(rule: str | None) -> None:
    """Whatever stands beside it, in whatever order."""
    seeds, positions = [3, 4, 3, 2**40], [10, 11, 500, 0]
    p, drafts = laws(4, 3, 8), torch.tensor([[1, 2], [0, 5], [7, 7], [3, 3]])

    def draw(rows: list[int]) -> list[list[int]]:
        source = KeyedSource(*(seeds[row] for row in rows))
        source.seek(*(positions[row] for row in rows))
        if rule is None:
            return source.categorical(p[rows]).tolist()
        verdict = verify(rule, drafts[rows], laws(4, 2, 8)[rows], p[rows], source)
        return [[int(a), int(b)] for a, b in zip(verdict.num_accepted, verdict.next_token, strict=True)]

    alone = [draw([row])[0] for row in range(4)]
    for rows in ([0, 1, 2, 3], [3, 1], [2, 0], [1, 1, 2]):
        assert draw(rows) == [alone[row] for row in rows]


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UserError, match=rf"--seed is {seed}; use a whole number from 0 to 2\*\*63 - 1\."):
        KeyedSource(seed)


def test_rules_that_need_uniform_numbers_fail_at_once() -> None:
    p, q = laws(1, 3, 4), laws(1, 2, 4)
    for rule in ("token", "block"):
        with pytest.raises(NotImplementedError):
            verify(rule, torch.tensor([[0, 1]]), q, p, KeyedSource(0))


# ---- laws --------------------------------------------------------------------------------------------------------

P, Q = torch.tensor([0.5, 0.25, 0.15, 0.1]).double(), torch.tensor([0.2, 0.3, 0.4, 0.1]).double()


def race(seeds: range, position: int, *rows: Tensor) -> list[tuple[int, ...]]:
    """For every seed, the draws of several laws at one position."""
    draws = []
    for seed in seeds:
        source = KeyedSource(seed)
        outcome = []
        for row in rows:
            source.seek(position)
            outcome.append(int(source.categorical(row)))
        draws.append(tuple(outcome))
    return draws


@pytest.mark.parametrize("position", [0, 7])
def test_draws_follow_p_over_seeds(position: int) -> None:
    draws = Counter(token for (token,) in race(range(10_000), position, P))
    assert chi_square(draws, dict(enumerate(P.tolist()))).p_value > FALSE_ALARM
    assert chi_square(draws, dict(enumerate(Q.tolist()))).p_value < FALSE_ALARM  # negative control


def test_coupled_draws_agree_as_often_as_theory_says() -> None:
    """P(both are x) = 1 / sum_y max(p_y / p_x, q_y / q_x), to 5 standard deviations (one in 1.7 million seeds)."""
    together = sum(float(1 / torch.maximum(P / P[x], Q / Q[x]).sum()) for x in range(4))
    independent = float((P * Q).sum())
    count = 10_000
    agreed = sum(a == b for a, b in race(range(count), 3, P, Q)) / count
    assert agreed == pytest.approx(together, abs=5 * math.sqrt(together * (1 - together) / count))
    assert agreed > independent + 0.2


def test_the_race_gap_is_what_turns_the_race() -> None:
    for seed in range(30):
        source = KeyedSource(seed)
        source.seek(4)
        winner = int(source.categorical(P))
        for other in {0, 1, 2, 3} - {winner}:
            gap = race_gap(P, seed, 4, (winner, other))
            assert gap == race_gap(P, seed, 4, (other, winner)) > 0
            for share, expected in ((0.999, winner), (1.001, other)):
                pair = torch.zeros(4).double()
                pair[winner], pair[other] = P[winner], P[other] * math.exp(gap * share)
                source.seek(4)
                assert int(source.categorical(pair)) == expected
