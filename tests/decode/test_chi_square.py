"""Pearson's test against numbers computed by hand, and its errors of both kinds on samples of a known law."""

import math

import pytest
import torch

from decode.chi_square import ChiSquare, chi_square

UNIFORM4 = dict.fromkeys(range(4), 0.25)


def test_statistic_by_hand() -> None:
    """Expected 30, 50, 20 of 100: (36 - 30)² / 30 + (45 - 50)² / 50 + (19 - 20)² / 20 = 1.2 + 0.5 + 0.05."""
    test = chi_square({"a": 36, "b": 45, "c": 19}, {"a": 0.3, "b": 0.5, "c": 0.2})
    assert test.statistic == pytest.approx(1.75)
    assert test.degrees == 2
    assert test.p_value == pytest.approx(math.exp(-1.75 / 2))  # two degrees: an exponential law


def two_cells(statistic: float, total: int = 10**8) -> ChiSquare:
    """A fair coin whose statistic is the asked one: 4 d² / n for d heads too many."""
    extra = math.sqrt(statistic * total / 4)
    return chi_square({"heads": total / 2 + extra, "tails": total / 2 - extra}, {"heads": 0.5, "tails": 0.5})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("quantile", "p_value"), [(0.4549364, 0.5), (2.705543, 0.1), (3.841459, 0.05), (6.634897, 0.01), (15.13670, 1e-4)]
)
def test_known_quantiles_of_one_degree(quantile: float, p_value: float) -> None:
    test = two_cells(quantile)
    assert test.degrees == 1
    assert test.statistic == pytest.approx(quantile, rel=1e-6)
    assert test.p_value == pytest.approx(p_value, rel=1e-4)


@pytest.mark.parametrize(
    ("degrees", "quantile", "p_value"),
    [(2, 5.991465, 0.05), (5, 11.07050, 0.05), (10, 23.20925, 0.01), (63, 82.52873, 0.05)],
)
def test_known_quantiles_of_more_degrees(degrees: int, quantile: float, p_value: float) -> None:
    """All of the surplus in the first cell, taken from the second: 2 d² / expected."""
    cells, total = degrees + 1, 10**8
    expected = total / cells
    extra = math.sqrt(quantile * expected / 2)
    counts = dict.fromkeys(range(cells), expected) | {0: expected + extra, 1: expected - extra}
    test = chi_square(counts, dict.fromkeys(range(cells), 1 / cells))  # type: ignore[arg-type]
    assert test.degrees == degrees
    assert test.p_value == pytest.approx(p_value, rel=1e-4)


def test_a_perfect_sample_and_a_hopeless_one() -> None:
    assert chi_square(dict.fromkeys(range(4), 25), UNIFORM4) == ChiSquare(0.0, 3, 1.0)
    assert chi_square({0: 100}, UNIFORM4).p_value < 1e-50


def test_a_large_statistic_keeps_its_p_value() -> None:
    """Not 1 - cdf, which is 0 below 1e-16: chi-square 60 on one degree is 9.5e-15, 100 on two is exp(-50)."""
    assert two_cells(60.0).p_value == pytest.approx(math.erfc(math.sqrt(30)), rel=1e-6)
    test = chi_square({"a": 150, "b": 25, "c": 25}, {"a": 0.5, "b": 0.25, "c": 0.25})
    assert test.statistic == pytest.approx(50.0)
    assert test.p_value == pytest.approx(math.exp(-25), rel=1e-9)


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_rare_outcomes_share_a_cell() -> None:
    """Of 100: 60, 30, and four that are expected 2.5 times each: together 10 expected, 14 seen."""
    law = {"a": 0.6, "b": 0.3, **{f"rare {index}": 0.025 for index in range(4)}}
    counts = {"a": 58, "b": 28, "rare 0": 14}
    test = chi_square(counts, law)
    assert test.degrees == 2
    assert test.statistic == pytest.approx(4 / 60 + 4 / 30 + 16 / 10)


def test_outcomes_too_rare_to_stand_together_join_the_smallest_cell() -> None:
    """The pooled cell would be expected 4 times: it joins b, 36 expected and 40 seen."""
    law = {"a": 0.64, "b": 0.32, "rare 0": 0.02, "rare 1": 0.02}
    test = chi_square({"a": 60, "b": 31, "rare 1": 9}, law)
    assert test.degrees == 1
    assert test.statistic == pytest.approx(16 / 64 + 16 / 36)


def test_ten_expected_are_enough_for_a_cell() -> None:
    assert chi_square({"a": 90, "b": 10}, {"a": 0.9, "b": 0.1}).degrees == 1
    assert chi_square({"a": 90, "b": 9}, {"a": 0.9, "b": 0.1}).degrees == 0  # 9.9 expected of 99


def test_a_single_cell_tells_nothing() -> None:
    assert chi_square({"a": 50}, {"a": 1.0}) == ChiSquare(0.0, 0, 1.0)
    law = dict.fromkeys(range(10), 0.1)
    assert chi_square({0: 4}, law) == ChiSquare(0.0, 0, 1.0)  # all are rare


@pytest.mark.parametrize("law", [{"a": 1.0}, {"a": 1.0, "b": 0.0}, {"a": 0.5, "c": 0.5}])
def test_an_impossible_outcome_gives_no_chance(law: dict[str, float]) -> None:
    assert chi_square({"a": 10_000, "b": 1}, law).p_value == 0.0


def test_an_outcome_that_did_not_happen_need_not_be_possible() -> None:
    assert chi_square({"a": 52, "b": 48, "never": 0}, {"a": 0.5, "b": 0.5}).p_value > 0.5


def test_an_outcome_that_never_happens_counts() -> None:
    """Missing from the counts is 0 seen: 25 expected."""
    test = chi_square({0: 34, 1: 33, 2: 33}, UNIFORM4)
    assert test.statistic == pytest.approx((81 + 64 + 64 + 625) / 25)


# ---- errors of both kinds --------------------------------------------------------------------------------------------

TRIALS, SAMPLES = 3_000, 1_000


def p_values(sampled: torch.Tensor, tested: torch.Tensor) -> torch.Tensor:
    """p-values [TRIALS] of multinomial samples from one law, tested against another."""
    generator = torch.Generator().manual_seed(0)
    draws = sampled.multinomial(TRIALS * SAMPLES, replacement=True, generator=generator).view(TRIALS, SAMPLES)
    law = dict(enumerate(tested.tolist()))
    rows = torch.zeros(TRIALS, len(law), dtype=torch.long).scatter_add_(1, draws, torch.ones_like(draws))
    return torch.tensor([chi_square(dict(enumerate(row)), law).p_value for row in rows.tolist()])


@pytest.fixture(scope="module")
def law() -> torch.Tensor:
    """64 outcomes as of three positions with four tokens each, some of them rare."""
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).double().softmax(-1)
    return torch.einsum("a,b,c->abc", *rows).flatten()


@pytest.mark.parametrize("level", [0.2, 0.05, 0.01])
def test_false_alarms_are_as_frequent_as_the_level_says(law: torch.Tensor, level: float) -> None:
    """3,000 exact samples. The rate must lie within 4 standard deviations of a binomial law plus a tenth of the level,
    since the statistic of cells expected 5 times is only near to chi-square. The seed is fixed; over seeds this test
    fails for about 1 in 10,000."""
    rate = float((p_values(law, law) <= level).double().mean())
    assert abs(rate - level) < 4 * math.sqrt(level * (1 - level) / TRIALS) + 0.1 * level


def test_no_exact_sample_is_rejected_at_the_level_of_check(law: torch.Tensor) -> None:
    """At 1e-4, 0.3 of 3,000 are expected; three or more in 4 of 1,000 seeds."""
    assert int((p_values(law, law) <= 1e-4).sum()) < 3


def test_a_slightly_wrong_law_is_found(law: torch.Tensor) -> None:
    """Four of ten of the likeliest outcomes' mass moved to the next four, a total variation of 0.08: more than 9 in 10
    samples of 1,000 show it at a level of 1e-4. Half of that is seldom seen, so `check` takes more samples."""
    order = law.argsort(descending=True)
    distances, power = [], []
    for moved in (0.4, 0.2):
        wrong = law.clone()
        wrong[order[:4]] *= 1 - moved
        wrong[order[4:8]] += (law - wrong).sum() / 4
        distances.append(float((wrong - law).abs().sum() / 2))
        power.append(float((p_values(wrong, law) <= 1e-4).double().mean()))
    assert distances == pytest.approx([0.078, 0.039], abs=0.001)
    assert power[0] > 0.9
    assert power[1] < 0.5
