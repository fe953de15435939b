"""Does a sample follow a law? Pearson's chi-square test.

Knows: counts and expected probabilities. Refuses to know where they come from.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome", bound=Hashable)
_SMALLEST_EXPECTED = 10.0  # below it the chi-square law is a poor approximation in its far tail, which we use


@dataclass(frozen=True)
class ChiSquare:
    """Result of one test."""

    statistic: float
    degrees: int
    p_value: float
    """Chance of a statistic at least this large if the sample follows the law."""


def chi_square(counts: Mapping[Outcome, int], law: Mapping[Outcome, float]) -> ChiSquare:
    """Test `counts` of outcomes against `law`, whose probabilities sum to 1.

    Outcomes expected fewer than ten times are pooled. An outcome that the law does not know gives a p-value of 0: what
    is impossible must not happen once.
    """
    total = sum(counts.values())
    if any(count and law.get(outcome, 0.0) <= 0 for outcome, count in counts.items()):
        return ChiSquare(float("inf"), max(1, len(law) - 1), 0.0)
    pairs, rare, rare_expected = [], 0, 0.0
    for outcome, probability in law.items():
        expected, count = probability * total, counts.get(outcome, 0)
        if expected < _SMALLEST_EXPECTED:
            rare, rare_expected = rare + count, rare_expected + expected
        else:
            pairs.append((count, expected))
    if rare_expected >= _SMALLEST_EXPECTED or not pairs:
        pairs.append((rare, rare_expected))
    elif rare_expected > 0:  # too few even together: they join the smallest of the others
        smallest = min(range(len(pairs)), key=lambda index: pairs[index][1])
        pairs[smallest] = (pairs[smallest][0] + rare, pairs[smallest][1] + rare_expected)
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs if expected > 0)
    degrees = len(pairs) - 1
    if not degrees:
        return ChiSquare(0.0, 0, 1.0)
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return ChiSquare(statistic, degrees, float(torch.special.gammaincc(half[0], half[1])))
