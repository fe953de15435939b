"""`--draft-length auto`: how many tokens to draft in the next step, so that most tokens are committed per second.

Knows: what steps cost with each K, what was accepted so far, and the K that promises most; 0 where drafting does not
pay, tried again later. Refuses to know: the drafts of the step it chooses for. K is chosen before they are drawn, from
the past alone, so the output's law stays p.

Shapes: K draft position; n rows of a forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GUESS, WEIGHT = 0.6, 2.0  # acceptance of a position that was not tried yet, and how many trials that guess counts for
MEMORY = 0.98  # of a trial after one more step: some fifty steps count
CONTEXT = 64  # places of the text behind which costs are measured


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts."""

    verify: tuple[float, ...]
    """[K + 1] a forward of the base over 1, 2, …, K + 1 rows."""
    draft: tuple[float, ...]
    """[K + 1] drafting 0, 1, …, K tokens."""

    @classmethod
    def of_parts(cls, forward: Sequence[float], draft: float) -> "StepCosts":
        """From the seconds of a forward over 1, 2, …, K + 1 rows and of one draft (`decode.costs.measure_steps`)."""
        return cls(tuple(forward), tuple(k * draft for k in range(len(forward))))

    def of(self, draft_length: int) -> float:
        return self.verify[draft_length] + self.draft[draft_length]


class DraftLengths:
    """Chooses K for one step after another.

    The chance that a position is accepted once those before it are is estimated from recent steps. What was not tried
    for a while drifts back to a hopeful guess, so a K that was given up is tried again.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.most = len(costs.verify) - 1
        self._hits, self._trials = [0.0] * self.most, [0.0] * self.most

    @property
    def acceptance(self) -> list[float]:
        """[K] the estimates."""
        pairs = zip(self._hits, self._trials, strict=True)
        return [(hits + GUESS * WEIGHT) / (trials + WEIGHT) for hits, trials in pairs]

    def choose(self) -> int:
        """The K of most expected tokens per second: (1 + sum over k <= K of the product of acceptances up to k) / cost.

        The same as in Leviathan et al. 2022 (arXiv 2211.17192), section 3.3, with a cost and a chance of its own for
        every K in place of their constants.
        """
        expected, reached, best, rate = 1.0, 1.0, 0, 1.0 / self.costs.of(0)
        for k, chance in enumerate(self.acceptance, start=1):
            reached *= chance
            expected += reached
            if expected / self.costs.of(k) > rate:
                best, rate = k, expected / self.costs.of(k)
        return best

    def learn(self, drafted: int, accepted: int) -> None:
        """Take in what became of a step that drafted so many positions."""
        for k in range(self.most):
            self._hits[k] *= MEMORY
            self._trials[k] *= MEMORY
            if k < drafted and k <= accepted:
                self._trials[k] += 1
                self._hits[k] += k < accepted
