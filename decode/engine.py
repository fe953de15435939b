"""The decoding loop: draft, one base forward, verify, commit.

Knows: the order of a step, what must be rolled back, and what each step counts. Refuses to know text, tokenizers and
files: it takes token ids and yields token ids. One text at a time (B = 1); tensors keep the batch axis.

Shapes: B batch, K draft position, T position, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.stats import DecodeStats, Stopwatch
from decode.stopping import FinishReason, Stopping
from decode.target import Target
from mtp.errors import UserError
from mtp.sampling import RandomSource, SamplingConfig, finite_rows, to_probs
from mtp.verify import Verdict, verify


@dataclass(frozen=True)
class Step:
    """What one step adds to the text, after the stop rules."""

    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per token: an accepted draft (True), or the recovered or bonus token."""
    finish_reason: FinishReason | None


@dataclass
class Drafts:
    """K drafts and the very distributions they were drawn from."""

    tokens: Tensor
    """[B, K]"""
    q: Tensor
    """[B, K, V], zero outside the draft vocabulary."""
    lengths: Tensor
    """[B] how many count: those before the first row of q that was not finite."""


class Engine:
    """Decodes with a target (p) and, unless K is 0, a drafter (q)."""

    def __init__(self, target: Target, drafter: Drafter | None = None) -> None:
        self.target = target
        self.drafter = drafter

    def check_draft_length(self, draft_length: int | None) -> int:
        """The K to use: all the drafter has when none is named. UserError beyond that."""
        trained = self.drafter.max_draft_length if self.drafter else 0
        if draft_length is None:
            return trained
        if not 0 <= draft_length <= trained:
            why = f"these heads were trained for {trained}" if self.drafter else "there are no heads to draft with"
            raise UserError(f"--draft-length is {draft_length}, but {why}; use a number from 0 (off) to {trained}.")
        return draft_length

    def run(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        stopping: Stopping,
        random: RandomSource,
        stats: DecodeStats,
    ) -> Iterator[Step]:
        """Decode after `prompt` (at least one id) until a stop rule holds; K and the rule are those of `stats`.

        A row of p that is NaN or infinite is a UserError.
        """
        with torch.no_grad():
            text = _Text(self, prompt, sampling, random, stats)
        reason: FinishReason | None = None
        while reason is None:
            with torch.no_grad():
                step = text.step(stopping)
            reason = step.finish_reason
            yield step


class _Text:
    """One text being decoded: committed x_1…x_n, of which the target has seen n - 1 and the drafter n - 1 anchors."""

    def __init__(
        self, engine: Engine, prompt: Sequence[int], sampling: SamplingConfig, random: RandomSource, stats: DecodeStats
    ) -> None:
        self.target = engine.target
        self.drafter = engine.drafter if stats.draft_length else None
        self.sampling = sampling
        self.random = random
        self.stats = stats
        self.watch = Stopwatch(stats, self.target.device)
        with self.watch.phase("prefill"):
            self._prefill(torch.tensor([list(prompt)], device=self.target.device))

    def _prefill(self, prompt: Tensor) -> None:
        self.length = prompt.shape[1]
        self.last = prompt[:, -1]
        self.target.start(self.drafter.feature_layers if self.drafter else ())
        if self.drafter:
            self.drafter.start(prompt)
        if self.length > 1:
            output = self.target.forward(prompt[:, :-1], num_logits=0)
            if self.drafter:
                self.drafter.ingest(output.features, prompt[:, 1:])

    def step(self, stopping: Stopping) -> Step:
        with self.watch.phase("draft"):
            drafts = self._draft(self._room_for_drafts(stopping.remaining))
        with self.watch.phase("verify"):
            block = torch.cat([self.last[:, None], drafts.tokens], dim=1) if drafts else self.last[:, None]
            output = self.target.forward(block, num_logits=block.shape[1])
            verdict, counts, overlap = self._judge(drafts, output.logits)
        with self.watch.phase("other"):
            kept, reason = stopping.cut(counts.tokens)
            self.stats.record(counts.drafted, counts.accepted, kept, overlap)
            self.stats.residual_empty += counts.residual_empty
            self.stats.nonfinite_drafts += counts.nonfinite
            if reason is None:
                self._commit(block, verdict, counts.accepted, output.features)
            drafted = tuple(index < counts.accepted for index in range(kept))
        return Step(tuple(counts.tokens[:kept]), drafted, reason)

    def _room_for_drafts(self, remaining: int) -> int:
        """K of this step: a step commits up to K + 1 tokens. Without any anchor there is nothing to draft from."""
        if self.drafter is None or self.length < 2:
            return 0
        return min(self.stats.draft_length, remaining - 1)

    def _draft(self, count: int) -> Drafts | None:
        if not count:
            return None
        assert self.drafter is not None
        tokens, rows, finite = [], [], []
        previous = self.last
        for k in range(1, count + 1):
            logits = self.drafter.draft(k, previous)
            previous, q = propose(logits, self.sampling, self.random)
            finite.append(finite_rows(logits))
            rows.append(q)
            if self.drafter.draft_ids is not None:
                previous = self.drafter.draft_ids[previous]
            tokens.append(previous)
        # Only drafts from the bad row on are dropped: dropping an earlier one because of a row that depends on it would
        # choose among samples after seeing them, and bend the output.
        good = torch.stack(finite, dim=1)
        return Drafts(
            torch.stack(tokens, dim=1),
            torch.stack(rows, dim=1).masked_fill(~good[..., None], 0.0),
            good.long().cumprod(dim=1).sum(dim=1),
        )

    def _judge(self, drafts: Drafts | None, logits: Tensor) -> "tuple[Verdict, _Counts, list[float]]":
        p = to_probs(logits, self.sampling)
        if drafts is None:
            empty = logits.new_zeros(1, 0)
            drafts = Drafts(empty.long(), p[:, :0], empty.long().sum(dim=1))
        q = spread(drafts.q, self.drafter.draft_ids if self.drafter else None, p.shape[-1])
        verdict = verify(self.stats.rule, drafts.tokens, q, p, self.random, drafts.lengths)
        counts = _Counts.read(drafts, verdict, finite_rows(logits))
        overlap: list[float] = torch.minimum(p[:, : q.shape[1]], q).sum(dim=-1)[0].tolist()
        return verdict, counts, overlap

    def _commit(self, block: Tensor, verdict: Verdict, accepted: int, features: Tensor) -> None:
        """Keep x_n and the accepted drafts in the target, and show the drafter each of them with its next token."""
        self.target.rollback(self.length + accepted)
        self.length += accepted + 1
        self.last = verdict.next_token
        if self.drafter:
            next_tokens = torch.cat([block[:, 1 : accepted + 1], self.last[:, None]], dim=1)
            self.drafter.ingest(features[:, : accepted + 1], next_tokens)


def propose(logits: Tensor, sampling: SamplingConfig, random: RandomSource) -> tuple[Tensor, Tensor]:
    """One draft [B] (an id of the draft vocabulary) from logits [B, Vd], and the q [B, Vd] it was drawn from."""
    q = to_probs(logits, sampling)
    return (q.argmax(dim=-1) if sampling.greedy else random.categorical(q)), q


def spread(q: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """q [B, K, Vd] over the draft vocabulary to [B, K, V]: zero where the drafter can propose nothing."""
    if draft_ids is None or not q.shape[1]:
        return q
    return q.new_zeros(*q.shape[:-1], vocab_size).index_copy_(-1, draft_ids, q)


def effective_rule(sampling: SamplingConfig) -> str:
    """The exact rule for these settings."""
    return "greedy" if sampling.greedy else "token"


@dataclass
class _Counts:
    """The outcome of a step as Python numbers, read from the device in one go."""

    drafted: int
    accepted: int
    nonfinite: int
    residual_empty: int
    tokens: list[int]

    @classmethod
    def read(cls, drafts: Drafts, verdict: Verdict, finite: Tensor) -> "_Counts":
        scalars = [drafts.lengths, verdict.num_accepted, verdict.residual_empty.long(), verdict.next_token]
        row = torch.cat([torch.stack(scalars, dim=1), drafts.tokens, finite.long()], dim=1)[0]
        values: list[int] = row.tolist()
        drafted, accepted, residual_empty, next_token = values[:4]
        asked = drafts.tokens.shape[1]
        tokens, p_finite = values[4 : 4 + asked], values[4 + asked :]
        if not all(p_finite[: accepted + 1]):
            raise UserError(
                "the base returned NaN or infinite logits; load it with --dtype float32 (or bfloat16), "
                "or check its weights."
            )
        return cls(drafted, accepted, int(drafted < asked), residual_empty, [*tokens[:accepted], next_token])
