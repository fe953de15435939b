"""The law of the engine's text, by walking every outcome of its draws, against the product of the base's conditionals.

What is right passes `law_error`, and every mutant must fail the same function by a margin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decode.engine import Engine
from decode.request import Request
from decode.stats import DecodeStats
from decode.stopping import Stopping, room
from decode.walk import Branching, walk
from mtp.errors import UserError
from mtp.processors import TextProcessors
from mtp.sampling import RandomSource, finite_rows, to_probs
from tests.decode.toys import (
    BLOCK,
    PLAIN,
    REFUSED,
    Conditional,
    TableDrafter,
    TableTarget,
    decode,
    table,
    total_variation,
    true_law,
)

EXACT = 1e-12
P, Q = table(0), table(1)
P2, Q2 = table(4, vocab=2), table(5, vocab=2)
MATCH = Request(temperature=1.0, verify="match")
CHAIN_RULES = {"token": PLAIN, "block": BLOCK, "match": MATCH}


@dataclass
class Walked:
    """All texts of the engine and their chance, and sums over all outcomes, however unlikely."""

    law: dict[tuple[int, ...], float]
    truth: dict[tuple[int, ...], float]
    drafted: int = 0
    accepted: int = 0
    residual_empty: int = 0
    unusable_q: int = 0
    lookup_drafted: int = 0
    lookup_accepted: int = 0
    mean: dict[str, float] = field(default_factory=dict)
    """Expected drafted and accepted per text."""

    @property
    def error(self) -> float:
        assert abs(sum(self.law.values()) - 1) < EXACT
        return total_variation(self.law, self.truth)


def walk_engine(
    draft_length: int,
    new_tokens: int,
    *,
    p: Tensor = P,
    q: Tensor = Q,
    prompt: Sequence[int] = (1, 2),
    request: Request = PLAIN,
    draft_ids: Tensor | None = None,
    eos: tuple[int, ...] = (),
    source: Callable[[list[int]], Branching] | None = None,
    drafter: type[TableDrafter] = TableDrafter,
) -> Walked:
    """Decode once for every outcome of all draws; p and q are logits [V, V, V]."""
    truth = true_law(conditional_of(p, request, prompt, eos), list(prompt), new_tokens, eos)
    walked = Walked({}, truth, mean={"drafted": 0.0, "accepted": 0.0})

    def run(random: RandomSource) -> tuple[int, ...]:
        engine = Engine(TableTarget(p), drafter(q, draft_ids=draft_ids))
        try:
            tokens, stats = decode(
                engine, list(prompt), new_tokens, draft_length, request=request, random=random, eos=eos
            )
        except UserError:
            return REFUSED
        assert stats.committed == len(tokens)
        walked.drafted += stats.drafted
        walked.accepted += stats.accepted
        walked.residual_empty += stats.residual_empty
        walked.unusable_q += stats.unusable_q
        walked.lookup_drafted += stats.lookup_drafted
        walked.lookup_accepted += stats.lookup_accepted
        assert isinstance(random, Branching)
        walked.mean["drafted"] += random.probability * stats.drafted
        walked.mean["accepted"] += random.probability * stats.accepted
        return tokens

    walked.law = walk(run, source)
    return walked


def law_error(draft_length: int, new_tokens: int, **settings: object) -> float:
    """Total variation between the law of the engine's text and the product of p's conditionals."""
    walked = walk_engine(draft_length, new_tokens, **settings)  # type: ignore[arg-type]
    assert 0 < walked.accepted < walked.drafted, "a check in which nothing was accepted or rejected proves nothing"
    return walked.error


def conditional_of(p: Tensor, request: Request, prompt: Sequence[int], eos: tuple[int, ...]) -> Conditional:
    """The base's conditional under the request's settings, for the whole text before it; NaN where there is none."""
    processors = TextProcessors(request, len(prompt), eos, p.shape[-1], "cpu")

    def conditional(text: list[int]) -> Tensor:
        raw = p[([0, *text])[-2], text[-1]][None]
        logits = processors(torch.tensor([text]), raw)
        usable = finite_rows(raw) & finite_rows(logits)
        return to_probs(logits, request)[0] if usable else torch.full_like(raw[0], torch.nan)

    return conditional


def sparse(logits: Tensor, *cells: tuple[int, int, int]) -> Tensor:
    """`logits` with some tokens made impossible."""
    logits = logits.clone()
    for cell in cells:
        logits[cell] = -torch.inf
    return logits


def spoiled(logits: Tensor, *contexts: tuple[int, int], value: float = torch.nan) -> Tensor:
    """`logits` whose rows after `contexts` hold one `value` that makes them no distribution."""
    logits = logits.clone()
    for context in contexts:
        logits[(*context, 0)] = value
    return logits


def accepted_law(
    draft_length: int, *, p: Tensor = P, q: Tensor = Q, request: Request = BLOCK, prompt: Sequence[int] = (1, 2)
) -> dict[tuple[int, ...], float]:
    """The law of how many drafts the first step accepts: keys are (n,)."""

    def run(random: RandomSource) -> tuple[int, ...]:
        engine = Engine(TableTarget(p), TableDrafter(q))
        stats = DecodeStats(request.reported_rule, draft_length, request.tree)
        steps = engine.run(
            prompt, request=request, stopping=Stopping(room(2, 10_000, 1_000)), random=random, stats=stats
        )
        return (sum(next(steps).drafted),)

    return walk(run)


def mean_accepted(draft_length: int, **settings: object) -> float:
    """Expected number of drafts that the first step accepts."""
    return sum(count * chance for (count,), chance in accepted_law(draft_length, **settings).items())  # type: ignore[arg-type]


def toy() -> tuple[Tensor, Tensor]:
    """p = (1/3, 2/3) and q = (2/3, 1/3) in every context: two drafts keep 10/9 by the token rule, 11/9 by the block's.

    Sun et al. 2024 (arXiv 2403.10444), section 3.
    """
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    return p.log().expand(2, 2, 2), p.flip(0).log().expand(2, 2, 2)
