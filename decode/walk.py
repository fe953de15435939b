"""The exact law of a program that draws random numbers: run it once for every outcome of its draws.

Knows: how to replay prescribed outcomes and which come next. Refuses to know what the program does.

Shapes: `...` is any leading shape, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from mtp.sampling import RandomSource


class Branching(RandomSource):
    """Replays a prescribed outcome of each draw, then takes the first possible one; notes probabilities and options."""

    def __init__(self, prescribed: list[int]) -> None:
        super().__init__(0)
        self.prescribed = prescribed
        self.taken: list[int] = []
        self.options: list[int] = []
        self.probability = 1.0

    def _choose(self, outcomes: list[int], weights: list[float]) -> int:
        """One of the outcomes, whose weights are positive and sum to 1."""
        index = self.prescribed[len(self.taken)] if len(self.taken) < len(self.prescribed) else 0
        self.taken.append(index)
        self.options.append(len(outcomes))
        self.probability *= weights[index]
        return outcomes[index]

    def bernoulli(self, prob: Tensor) -> Tensor:
        outcomes = []
        for value in prob.flatten().tolist():
            pairs = [(outcome, weight) for outcome, weight in ((0, 1 - value), (1, value)) if weight > 0]
            outcomes.append(bool(self._choose([outcome for outcome, _ in pairs], [weight for _, weight in pairs])))
        return torch.tensor(outcomes, dtype=torch.bool, device=prob.device).reshape(prob.shape)

    def categorical(self, probs: Tensor) -> Tensor:
        ids = [self._draw(row) for row in probs.double().reshape(-1, probs.shape[-1])]
        return torch.tensor(ids, device=probs.device).reshape(probs.shape[:-1])

    def _draw(self, row: Tensor) -> int:
        possible = (row > 0).nonzero()[:, 0]
        if not len(possible):  # no mass: 0, as the real one
            return 0
        weights = row[possible]
        return self._choose(possible.tolist(), (weights / weights.sum()).tolist())


def walk(
    run: Callable[[RandomSource], tuple[int, ...]], source: Callable[[list[int]], Branching] | None = None
) -> dict[tuple[int, ...], float]:
    """The law of what `run` returns, over all outcomes of its draws."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    prescribed: list[int] | None = []
    while prescribed is not None:
        random = (source or Branching)(prescribed)
        law[run(random)] += random.probability
        prescribed = _next_branch(random)
    return law


def _next_branch(random: Branching) -> list[int] | None:
    for depth in reversed(range(len(random.taken))):
        if random.taken[depth] + 1 < random.options[depth]:
            return [*random.taken[:depth], random.taken[depth] + 1]
    return None
