"""The decoding loop: draft, one base forward, verify, commit.

Knows: the order of a step, what must be rolled back, and what each step counts. Refuses to know text, tokenizers and
files: it takes token ids and yields token ids. One text at a time (B = 1); tensors keep the batch axis.

Shapes: B batch, K draft position, R rows of a block, T position, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from decode.chain import Chain, Drafting, Outcome, copy_chain, draft_chain
from decode.draft_length import DraftLengths
from decode.drafters import Drafter
from decode.laws import Laws, refuse_row
from decode.lookup import NgramIndex
from decode.request import Request
from decode.stats import DecodeStats, Stopwatch
from decode.stopping import FinishReason, Stopping
from decode.target import Target
from decode.tree_shape import TreeShape
from decode.trees import Tree, draft_tree
from mtp.errors import UserError
from mtp.processors import TextProcessors
from mtp.sampling import RandomSource
from mtp.verify import Rule

_MOST_WAITING = 32  # steps without drafts, whose features are kept


@dataclass(frozen=True)
class Step:
    """What one step adds to the text, after the stop rules."""

    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per token: an accepted draft (True), or the recovered or bonus token."""
    finish_reason: FinishReason | None
    logprobs: tuple[float, ...] = ()
    """Per token, if the request asks: log-probability under the base, before any processor."""


class Engine:
    """Decodes with a target (p) and, unless K is 0, a drafter (q)."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
        lengths: DraftLengths | None = None,
    ) -> None:
        """`rule` judges chains in place of the request's own: how `decode.check` shows what a wrong one does. `lengths`
        chooses K in every step; None drafts all that is asked for."""
        self.target = target
        self.drafter = drafter
        self.rule = rule
        self.lengths = lengths

    def check_draft_length(self, draft_length: int | Literal["auto"] | None) -> int:
        """The largest K to use: all the drafter has when none is named. UserError beyond that."""
        trained = self.drafter.max_draft_length if self.drafter else 0
        if draft_length is None or draft_length == "auto":
            return trained
        if not 0 <= draft_length <= trained:
            why = f"these heads were trained for {trained}" if self.drafter else "there are no heads to draft with"
            raise UserError(f"--draft-length is {draft_length}, but {why}; use a number from 0 (off) to {trained}.")
        return draft_length

    def run(
        self,
        prompt: Sequence[int],
        *,
        request: Request,
        stopping: Stopping,
        random: RandomSource,
        stats: DecodeStats,
        processors: TextProcessors | None = None,
    ) -> Iterator[Step]:
        """Decode after `prompt` (at least one id) until a stop rule holds; K and lookup are those of `stats`.

        A row of p that is NaN, infinite or without any token is a UserError when the text reaches it.
        """
        with torch.inference_mode():
            text = _Text(self, prompt, request, random, stats, processors)
        reason: FinishReason | None = None
        while reason is None:
            with torch.inference_mode():
                step = text.step(stopping)
            reason = step.finish_reason
            yield step


class _Text:
    """One text being decoded: committed x_1…x_n, of which the target has seen n - 1 and the drafter n - 1 anchors."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        request: Request,
        random: RandomSource,
        stats: DecodeStats,
        processors: TextProcessors | None,
    ) -> None:
        self.target = engine.target
        self.drafter = engine.drafter if stats.draft_length else None
        self.request, self.random, self.stats = request, random, stats
        self.rule, self.lengths = engine.rule or request.rule, engine.lengths
        self.waiting: list[tuple[Tensor, Tensor]] = []  # verified anchors that the drafter has not taken in yet
        self.laws = Laws(request, processors, self.drafter.draft_ids if self.drafter else None)
        self.shape = TreeShape.parse(request.tree) if request.tree and self.drafter else None
        self.watch = Stopwatch(stats, self.target.device)
        self.text = torch.tensor(list(prompt), device=self.target.device)
        with self.watch.phase("prefill"):
            self.index = NgramIndex(prompt) if stats.lookup else None
            self._prefill(self.text[None])

    def _prefill(self, prompt: Tensor) -> None:
        self.target.start(self.drafter.feature_layers if self.drafter else ())
        if self.drafter:
            self.drafter.start(prompt)
        if prompt.shape[1] > 1:
            output = self.target.forward(prompt[:, :-1], num_logits=0)
            if self.drafter:
                self.drafter.ingest(output.features, prompt[:, 1:])

    def step(self, stopping: Stopping) -> Step:
        length = len(self.text)
        with self.watch.phase("draft"):
            self.random.seek(length)
            proposal = self._propose(stopping.remaining)
        with self.watch.phase("verify"):
            output = proposal.forward(self.target)
        with self.watch.phase("rule"):
            self.random.seek(length)
            p, check = self.laws.p(output.logits[0], self.text, proposal.suffixes())
            outcome = proposal.judge(self.rule, p, check, self.random)
        with self.watch.phase("other"):
            kept, reason = stopping.cut(outcome.tokens[: outcome.sound])
            if reason is None and outcome.sound < len(outcome.tokens):
                raise refuse_row(outcome.finite[outcome.sound])
            logprobs = self._logprobs(output.logits[0], outcome)[:kept] if self.request.logprobs else ()
            self._count(outcome, kept)
            if reason is None:
                self._commit(outcome, output.features)
            drafted = tuple(index < len(outcome.path) for index in range(kept))
        return Step(tuple(outcome.tokens[:kept]), drafted, reason, tuple(logprobs))

    def _room_for_drafts(self, remaining: int) -> int:
        """K of this step: a step commits up to K + 1 tokens. Without any anchor there is nothing to draft from."""
        if self.drafter is None or len(self.text) < 2:
            return 0
        wanted = self.stats.draft_length if self.lengths is None else self.lengths.choose()
        return min(wanted, remaining - 1)

    def _take_in(self) -> None:
        """Show the drafter what was committed since it last drafted, in one call."""
        if self.drafter and self.waiting:
            features, tokens = zip(*self.waiting, strict=True)
            self.drafter.ingest(torch.cat(features, dim=1), torch.cat(tokens, dim=1))
            self.waiting = []

    def _propose(self, remaining: int) -> "Chain | Tree":
        """Whether the drafts are copied is decided by the committed text, before anything is drawn."""
        given = Drafting(self.drafter, self.text, self.laws, self.target.vocab_size, self.request, self.random)
        copied = self._look_up(remaining)
        if copied:
            return copy_chain(given, copied)
        count = self._room_for_drafts(remaining)
        if count:
            self._take_in()
        if self.shape is not None and count:
            return draft_tree(given, self.shape, count)
        return draft_chain(given, count)

    def _look_up(self, remaining: int) -> list[int]:
        """What followed the text's last tokens where they stood before, as far as it may follow here."""
        if self.index is None:
            return []
        found = self.index.continuation(min(self.stats.lookup, remaining - 1))
        return self.laws.allowed(found, self.text, self.target.vocab_size)

    def _logprobs(self, logits: Tensor, outcome: Outcome) -> list[float]:
        rows = logits[[0, *outcome.path]].log_softmax(dim=-1)
        chosen: list[float] = rows.gather(1, torch.tensor(outcome.tokens, device=rows.device)[:, None])[:, 0].tolist()
        return chosen

    def _count(self, outcome: Outcome, kept: int) -> None:
        if self.lengths is not None and not outcome.copied:
            self.lengths.learn(outcome.drafted, len(outcome.path))
        self.stats.record(outcome.drafted, len(outcome.path), kept, outcome.overlap, outcome.nodes, outcome.copied)
        self.stats.residual_empty += outcome.residual_empty
        self.stats.unusable_q += outcome.unusable_q

    def _commit(self, outcome: Outcome, features: Tensor) -> None:
        """Keep x_n and the accepted drafts in the target, and show the drafter each of them with its next token."""
        length, accepted = len(self.text), len(outcome.path)
        if outcome.path == list(range(1, accepted + 1)):
            self.target.rollback(length + accepted)
        else:
            self.target.keep(length, [length - 1 + row for row in outcome.path])
        committed = torch.tensor(outcome.tokens, device=self.text.device)
        self.text = torch.cat([self.text, committed])
        if self.index is not None:
            self.index.extend(outcome.tokens)
        if self.drafter:
            self.waiting.append((features[:, [0, *outcome.path]], committed[None]))
            if len(self.waiting) == _MOST_WAITING:
                self._take_in()
