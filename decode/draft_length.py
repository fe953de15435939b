"""`--draft-length auto`: how many tokens to draft in the next step, so that most tokens are committed per second.

Knows: what steps cost with each K, what was accepted so far, and the K that promises most; 0 where drafting does not
pay, tried again later. Refuses to know: the drafts of the step it chooses for. K is chosen before they are drawn, from
the past alone, so the output's law stays p.

Shapes: K draft position; n rows of a forward.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decode.drafters import Drafter
from decode.target import Target

GUESS, WEIGHT = 0.6, 2.0  # acceptance of a position that was not tried yet, and how many trials that guess counts for
MEMORY = 0.98  # of a trial after one more step: some fifty steps count
_CONTEXT, _ROUNDS = 64, 5  # of the measurement: tokens that are cached, and timings of which the median counts


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step's parts."""

    verify: tuple[float, ...]
    """[K + 1] a forward of the base over 1, 2, …, K + 1 rows."""
    draft: tuple[float, ...]
    """[K + 1] drafting 0, 1, …, K tokens, what was committed before taken in."""

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


@torch.inference_mode()
def measure(target: Target, drafter: Drafter, most: int) -> StepCosts:
    """What steps with 0…`most` drafts cost here, in a second or less. The target and the drafter forget their text."""
    tokens = torch.arange(_CONTEXT + most + 1, device=target.device)[None] % target.vocab_size
    target.start(drafter.feature_layers)
    drafter.start(tokens[:, :_CONTEXT])
    features = target.forward(tokens[:, :_CONTEXT], num_logits=0).features
    drafter.ingest(features, tokens[:, 1 : _CONTEXT + 1])

    def verify(rows: int) -> None:
        target.forward(tokens[:, _CONTEXT : _CONTEXT + rows], num_logits=rows)
        target.rollback(_CONTEXT)

    def draft(count: int) -> None:
        # Anchors that were ingested cannot be taken back; these few do not change what drafting costs.
        drafter.ingest(features[:, :1], tokens[:, :1])
        for k in range(1, count + 1):
            drafter.draft(k, tokens[:, k]).argmax()

    lengths = range(most + 1)
    return StepCosts(
        verify=_medians(target.device, [lambda k=k: verify(k + 1) for k in lengths]),  # type: ignore[misc]
        draft=(0.0, *_medians(target.device, [lambda k=k: draft(k) for k in lengths[1:]])),  # type: ignore[misc]
    )


def _medians(device: torch.device, actions: Sequence[Callable[[], None]]) -> tuple[float, ...]:
    """Seconds of each action, the median of several rounds in which they take turns; one round before is not timed."""
    spent: list[list[float]] = [[] for _ in actions]
    for _ in range(1 + _ROUNDS):
        for action, times in zip(actions, spent, strict=True):
            started = time.perf_counter()
            action()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - started)
    return tuple(statistics.median(times[1:]) for times in spent)
