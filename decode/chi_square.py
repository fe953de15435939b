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

    Outcomes expected fewer than ten times are pooled, the likeliest first, into cells of at least ten. An outcome that
    the law does not know gives a p-value of 0: what is impossible must not happen once.
    """
    total = sum(counts.values())
    if any(count and law.get(outcome, 0.0) <= 0 for outcome, count in counts.items()):
        return ChiSquare(float("inf"), max(1, len(law) - 1), 0.0)
    pairs = _cells(counts, law, total)
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs if expected > 0)
    degrees = max(0, len(pairs) - 1)
    if not degrees:
        return ChiSquare(0.0, 0, 1.0)
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return ChiSquare(statistic, degrees, float(torch.special.gammaincc(half[0], half[1])))


def _cells(counts: Mapping[Outcome, int], law: Mapping[Outcome, float], total: int) -> list[tuple[int, float]]:
    """Counted and expected number of each cell."""
    cells: list[tuple[int, float]] = []
    count, expected = 0, 0.0
    for outcome, probability in sorted(law.items(), key=lambda item: -item[1]):
        count, expected = count + counts.get(outcome, 0), expected + probability * total
        if expected >= _SMALLEST_EXPECTED:
            cells.append((count, expected))
            count, expected = 0, 0.0
    if expected > 0 and cells:  # what is left is too little for a cell of its own
        cells[-1] = (cells[-1][0] + count, cells[-1][1] + expected)
    return cells
