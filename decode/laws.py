"""p and q of one text: the processors that look at the text so far, then the one road from logits to probabilities.

Knows: the request's settings for both models, and that each row has a text of its own: what is committed and the drafts
before it. Refuses to know: where logits come from, and what is done with the probabilities.

Shapes: R rows, V vocabulary, Vd draft vocabulary, n committed tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.request import Request
from mtp.errors import UserError
from mtp.processors import TextProcessors
from mtp.sampling import SamplingConfig, finite_rows, to_probs


class Laws:
    """Turns logits of the base and of the drafter into distributions over V."""

    def __init__(self, request: Request, processors: TextProcessors | None, draft_ids: Tensor | None) -> None:
        self._request, self._drafting = request, request.drafting
        self._processors = processors if processors is not None and processors.active else None
        self.draft_ids = draft_ids
        """[Vd] what the drafter can propose; None is everything."""
        self.look_at_text = self._processors is not None
        """Whether a processor will see what was drafted."""

    def p(self, logits: Tensor, committed: Tensor, suffixes: Sequence[Tensor]) -> tuple[Tensor, "RowCheck"]:
        """p [R, V] of the base's logits [R, V] after committed [n] and a row's drafts, and which rows are one.

        suffixes: the drafts before each row, [d] each.

        A row that is none becomes one token's: a rule may look at rows that it does not reach, and only reaching such
        a row is an error (`refuse_row`).
        """
        if self._processors is None and softmax_shows_faults(self._request):
            p = to_probs(logits, self._request)
            finite = possible = ~p[:, 0].isnan()  # spares a look at every logit
        else:
            finite = possible = finite_rows(logits)
            if self._processors is not None:
                logits = self._process(logits, committed, suffixes)
                possible = finite_rows(logits)
            p = to_probs(logits, self._request)
            # A possible row that comes out NaN has logits so large that a temperature took them out of range.
            finite = finite & ~(possible & p[:, 0].isnan())
        unusable = ~(finite & possible)
        if p.device.type != "cpu" or bool(unusable.any()):  # asking an accelerator costs more than the two passes
            p.masked_fill_(unusable[:, None], 0.0)
            p[:, 0] += unusable
        return p, RowCheck(finite, possible)

    def q(
        self, logits: Tensor, vocab_size: int, committed: Tensor, suffixes: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """q [R, V] of the drafter's logits [R, Vd], zero where it can propose nothing; and which rows are a law [R]."""
        if self._processors is not None:
            logits = self._process(self._spread(logits, vocab_size, -math.inf), committed, suffixes)
        q = to_probs(logits, self._drafting)
        usable = finite_rows(logits) & ~q[:, 0].isnan()
        if self._processors is None:  # to spread the law is cheaper than a law of what was spread
            q = self._spread(q, vocab_size, 0.0)
        if q.device.type != "cpu" or not bool(usable.all()):
            q.masked_fill_(~usable[:, None], 0.0)
        return q, usable

    def _spread(self, values: Tensor, vocab_size: int, absent: float) -> Tensor:
        """Values [R, Vd] of what can be proposed as [R, V]."""
        if self.draft_ids is None:
            return values
        return values.new_full((values.shape[0], vocab_size), absent).index_copy_(1, self.draft_ids, values)

    def allowed(self, drafts: Sequence[int], committed: Tensor, vocab_size: int) -> list[int]:
        """`drafts` that nobody drew, up to the first that the processors forbid.

        Behind that one there is nothing to see: no processor is shown a text that could never come to be.
        """
        if self._processors is None:
            return list(drafts)
        for count, token in enumerate(drafts):
            logits = torch.full((1, vocab_size), -math.inf, device=committed.device)
            logits[0, token] = 0.0
            if not bool(self._process(logits, committed, [committed.new_tensor(drafts[:count])])[0, token].isfinite()):
                return list(drafts[:count])
        return list(drafts)

    def _process(self, logits: Tensor, committed: Tensor, suffixes: Sequence[Tensor]) -> Tensor:
        """Row by row: their texts differ in length. Rows of the same length could share a call, but are few."""
        assert self._processors is not None
        rows = [
            self._processors(torch.cat([committed, suffix])[None], logits[row : row + 1])
            for row, suffix in enumerate(suffixes)
        ]
        return torch.cat(rows)


def softmax_shows_faults(sampling: SamplingConfig) -> bool:
    """Whether `to_probs` makes a row NaN throughout if its logits are no distribution, as softmax does by itself."""
    return not (sampling.greedy or sampling.typical_p < 1 or sampling.epsilon_cutoff > 0 or sampling.eta_cutoff > 0)


@dataclass
class RowCheck:
    """Which rows of p are distributions."""

    finite: Tensor
    """[R] bool: the base's own logits are usable."""
    possible: Tensor
    """[R] bool: the processors left at least one token."""


def refuse_row(finite: bool) -> UserError:
    """What to say when the text reaches a row of p that is no distribution."""
    if not finite:
        return UserError(
            "the base returned NaN or infinite logits; load it with --dtype float32 (or bfloat16), "
            "or check its weights."
        )
    return UserError(
        "the request's processors leave no token that could come next; loosen --suppress-tokens, --bad-words, "
        "--logit-bias, --no-repeat-ngram, --min-new-tokens or the prefix constraint, or mend your own processor."
    )
