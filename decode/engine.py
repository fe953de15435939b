"""The decoding loop: draft, one base forward, verify, commit.

Knows: the order of a step, what must be rolled back, and what each step counts. Refuses to know text, tokenizers and
files: it takes token ids and yields token ids. One text at a time (B = 1); tensors keep the batch axis. Whoever runs
the forwards of several texts in one (`decode.together`) calls the two halves of a step, `propose` and `decide`.

Shapes: B batch, K draft position, R rows of a block, T position, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from decode.target import Target, TargetOutput
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
    rejected: tuple[int, ...] = ()
    """The drafts in whose place the last token was recovered: one of a chain, siblings of a tree. None where the last
    token is the bonus, a draft, or came without drafts."""


@dataclass(frozen=True)
class Plan:
    """What a step is to draft, before it does."""

    given: Drafting
    copied: list[int]
    """Drafts that the text itself offers; then the heads are not asked."""
    count: int
    """K of this step."""


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
        begin = partial(
            self.begin,
            prompt,
            request=request,
            stopping=stopping,
            random=random,
            stats=stats,
            processors=processors,
        )
        return run_alone(begin)

    @torch.inference_mode()
    def begin(
        self,
        prompt: Sequence[int],
        *,
        request: Request,
        stopping: Stopping,
        random: RandomSource,
        stats: DecodeStats,
        processors: TextProcessors | None = None,
    ) -> "Decoding":
        """Read the prompt; what `run` goes on from."""
        return Decoding(self, prompt, request, stopping, random, stats, processors)


def run_alone(begin: "Callable[[], Decoding]") -> Iterator[Step]:
    """The steps of one text, which begins when the first is asked for."""
    text = begin()
    reason: FinishReason | None = None
    while reason is None:
        step = text.step()
        reason = step.finish_reason
        yield step


class Decoding:
    """One text being decoded: committed x_1…x_n, of which the target has seen n - 1 and the drafter n - 1 anchors."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        request: Request,
        stopping: Stopping,
        random: RandomSource,
        stats: DecodeStats,
        processors: TextProcessors | None,
    ) -> None:
        self.target = engine.target
        self.drafter = engine.drafter if stats.draft_length else None
        self.request, self.stopping, self.random, self.stats = request, stopping, random, stats
        self.rule, self.lengths = engine.rule or request.rule, engine.lengths
        self.waiting: list[tuple[Tensor, Tensor]] = []  # verified anchors that the drafter has not taken in yet
        self.laws = Laws(request, processors, self.drafter.draft_ids if self.drafter else None)
        self.shape = TreeShape.parse(request.tree) if request.tree and self.drafter else None
        self.watch = Stopwatch(stats, self.target.device)
        self.text = torch.tensor(list(prompt), device=self.target.device)
        with self.watch.phase("prefill"):
            self.index = NgramIndex(prompt) if stats.lookup else None
            self._prefill(self.text[None])

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The base's hidden states that the drafter needs of every forward."""
        return self.drafter.feature_layers if self.drafter else ()

    def _prefill(self, prompt: Tensor) -> None:
        self.target.start(self.feature_layers)
        if self.drafter:
            self.drafter.start(prompt)
        if prompt.shape[1] > 1:
            output = self.target.forward(prompt[:, :-1], num_logits=0)
            if self.drafter:
                self.drafter.ingest(output.features, prompt[:, 1:])

    @torch.inference_mode()
    def step(self) -> Step:
        """Draft, run the base over the drafts, judge, commit, and cut the base's cache back to what stays."""
        length, proposal = len(self.text), self.propose()
        with self.watch.phase("verify"):
            output = proposal.forward(self.target)
        step, path = self.decide(proposal, output)
        if step.finish_reason is None:
            with self.watch.phase("other"):
                if path == list(range(1, len(path) + 1)):
                    self.target.rollback(length + len(path))
                else:
                    self.target.keep(length, [length - 1 + row for row in path])
        return step

    def propose(self) -> Chain | Tree:
        """The drafts of the next step, whose block the base is to be run over."""
        with self.watch.phase("draft"):
            plan = self.plan()
            if plan.copied:
                return copy_chain(plan.given, plan.copied)
            if plan.count:
                self._take_in()
            if self.shape is not None and plan.count:
                return draft_tree(plan.given, self.shape, plan.count)
            return draft_chain(plan.given, plan.count)

    def decide(self, proposal: Chain | Tree, output: TargetOutput) -> tuple[Step, list[int]]:
        """Judge and commit, given what the base says of all rows of the block. With the step come the rows, below the
        first of the block, that are to stay in the base's cache.

        Raises UserError if the text reaches a row that is no distribution.
        """
        with self.watch.phase("rule"):
            self.random.seek(len(self.text))
            p, check = self.laws.p(output.logits[0], self.text, proposal.suffixes())
            outcome = proposal.judge(self.rule, p, check, self.random)
        with self.watch.phase("other"):
            kept, reason = self.stopping.cut(outcome.tokens[: outcome.sound])
            if reason is None and outcome.sound < len(outcome.tokens):
                raise refuse_row(outcome.finite[outcome.sound])
            logprobs = self._logprobs(output.logits[0], outcome)[:kept] if self.request.logprobs else ()
            self._count(outcome, kept)
            if reason is None:
                self._commit(outcome, output.features)
            drafted = tuple(index < len(outcome.path) for index in range(kept))
            rejected = outcome.rejected if kept == len(outcome.tokens) else ()
        return Step(tuple(outcome.tokens[:kept]), drafted, reason, tuple(logprobs), rejected), outcome.path

    def _room_for_drafts(self, remaining: int) -> int:
        """K of this step: a step commits up to K + 1 tokens. Without any anchor there is nothing to draft from."""
        if self.drafter is None or len(self.text) < 2:
            return 0
        wanted = self.stats.draft_length if self.lengths is None else self.lengths.choose()
        return min(wanted, remaining - 1)

    def _take_in(self) -> None:
        """Show the drafter what was committed since it last drafted, in one call."""
        if self.drafter and self.waiting:
            self.drafter.ingest(*self.take_waiting())

    def take_waiting(self) -> tuple[Tensor, Tensor]:
        """Verified anchors [1, T, F] and the token after each [1, T], which the caller shows the drafter."""
        features, tokens = zip(*self.waiting, strict=True)
        self.waiting = []
        return torch.cat(features, dim=1), torch.cat(tokens, dim=1)

    def plan(self) -> Plan:
        """How the next step is to be drafted. Whether the drafts are copied is decided by the committed text, before
        anything is drawn."""
        self.random.seek(len(self.text))
        given = Drafting(self.drafter, self.text, self.laws, self.target.vocab_size, self.request, self.random)
        copied = self._look_up(self.stopping.remaining)
        return Plan(given, copied, 0 if copied else self._room_for_drafts(self.stopping.remaining))

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
        """Lengthen the text, and show the drafter x_n and each accepted draft with its next token."""
        committed = torch.tensor(outcome.tokens, device=self.text.device)
        self.text = torch.cat([self.text, committed])
        if self.index is not None:
            self.index.extend(outcome.tokens)
        if self.drafter:
            self.waiting.append((features[:, [0, *outcome.path]], committed[None]))
            if len(self.waiting) == _MOST_WAITING:
                self._take_in()
