"""Acceptance statistics from per-position acceptances.

Knows: the arithmetic between alpha and acceptance length. Refuses to know: where the numbers were measured.
"""

from collections.abc import Sequence


def implied_accept_len(alpha: Sequence[float]) -> float:
    """tau = 1 + sum over k of the product of alpha_1…alpha_k, in committed tokens per step, 1…K+1.

    alpha_k is the acceptance of draft position k given that the earlier ones were accepted. Leviathan et al. 2022,
    arXiv 2211.17192, section 3.1, written for an alpha that differs by position.
    """
    total, reached = 1.0, 1.0
    for value in alpha:
        reached *= value
        total += reached
    return total
