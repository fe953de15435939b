"""A chain of drafts: one per position, each behind the other.

Knows: how to draft K tokens from q, when to draft fewer without bending the law, which q belongs to drafts that were
copied, and how a rule's verdict is read.
Refuses to know: the base's cache, stop rules, and what is done with the outcome.

Shapes: B batch, K draft position, R = K + 1 rows of the block, V vocabulary. B is 1.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.drafters import Drafter
from decode.laws import Laws, RowCheck
from decode.request import Request
from decode.target import Target, TargetOutput
from mtp.sampling import RandomSource
from mtp.verify import Rule, verify


@dataclass
class Outcome:
    """What a rule decided about a block, as Python numbers. Row 0 of the block is the last committed token."""

    path: list[int]
    """Rows of the block that stay, below row 0."""
    tokens: list[int]
    """Their tokens, and the recovered or bonus token."""
    drafted: int
    """Positions that were drafted."""
    nodes: int
    """Drafts at these positions; more than `drafted` in a tree."""
    overlap: list[float]
    """sum_x min(p, q) of each position that was reached: those that stay and the one behind them."""
    unusable_q: bool
    residual_empty: bool
    finite: list[bool]
    """Per token: whether the base's logits it was judged by or drawn from are usable."""
    possible: list[bool]
    """Per token: whether the processors left anything that could come."""
    rejected: tuple[int, ...] = ()
    """The drafts that stood where the last of `tokens` stands now; none where that is the bonus token."""
    copied: bool = False
    """Whether the drafts were copied from the text."""

    @property
    def sound(self) -> int:
        """How many tokens come before the first whose p is no distribution."""
        return [*(a and b for a, b in zip(self.finite, self.possible, strict=True)), False].index(False)


@dataclass
class Chain:
    """K drafts and the very distributions they were drawn from."""

    block: Tensor
    """[B, K + 1]: the last committed token and the drafts."""
    q: Tensor
    """[B, K, V], zero outside the draft vocabulary."""
    lengths: Tensor
    """[B] how many drafts count: those before the first row of q that was no distribution."""
    unusable_q: bool = False
    """Whether such a row ended the draft before it was drawn from."""
    copied: bool = False
    """Whether the drafts are not drawn but copied from the text."""

    def forward(self, target: Target) -> TargetOutput:
        return target.forward(self.block, num_logits=self.block.shape[1])

    def suffixes(self) -> list[Tensor]:
        """The drafts before each row."""
        return [self.block[0, 1 : row + 1] for row in range(self.block.shape[1])]

    def judge(self, rule: str | Rule, p: Tensor, check: RowCheck, random: RandomSource) -> Outcome:
        """Apply a rule for chains, given p [R, V]."""
        drafts = self.block[:, 1:]
        q = self.q if drafts.shape[1] else p[None, :0]
        verdict = verify(rule, drafts, q, p[None], random, self.lengths)
        # One transfer from the device for all that steers the step, and one for what is only counted.
        scalars = torch.stack([self.lengths, verdict.num_accepted, verdict.next_token, verdict.residual_empty.long()])
        values: list[int] = torch.cat([scalars[:, 0], drafts[0], check.finite, check.possible]).tolist()
        drafted, accepted, next_token, empty = values[:4]
        asked, rows = drafts.shape[1], drafts.shape[1] + 1
        tokens, flags = values[4 : 4 + asked], values[4 + asked :]
        reached = min(accepted + 1, asked)
        overlap: list[float] = torch.minimum(p[:reached], q[0, :reached]).sum(dim=-1).tolist()
        return Outcome(
            path=list(range(1, accepted + 1)),
            tokens=[*tokens[:accepted], next_token],
            drafted=drafted,
            nodes=drafted,
            overlap=overlap,
            unusable_q=self.unusable_q or drafted < asked,
            residual_empty=bool(empty),
            finite=[bool(flag) for flag in flags[: accepted + 1]],
            possible=[bool(flag) for flag in flags[rows : rows + accepted + 1]],
            rejected=tuple(tokens[accepted : min(accepted + 1, drafted)]),
            copied=self.copied,
        )


@dataclass
class Drafting:
    """What there is to draft with, and the text to draft behind."""

    drafter: Drafter | None
    committed: Tensor
    """[n]"""
    laws: Laws
    vocab_size: int
    request: Request
    random: RandomSource

    @property
    def last(self) -> Tensor:
        """[1] the last committed token."""
        return self.committed[-1:]


Chaining = Generator[tuple[int, Tensor], Tensor, Chain]
"""A chain being drafted: asks for the logits [B, Vd] of draft position k behind a token [B]."""


def draft_chain(given: Drafting, count: int) -> Chain:
    """Up to `count` drafts behind the text; a chain without drafts when `count` is 0."""
    chaining = grow_chain(given, count)
    try:
        asked = next(chaining)
        while given.drafter is not None:
            asked = chaining.send(given.drafter.draft(*asked))
    except StopIteration as done:
        chain: Chain = done.value
        return chain
    raise AssertionError("drafts were asked for, and there is nobody to draft")


def grow_chain(given: Drafting, count: int) -> Chaining:
    """The same, for whoever asks the drafters of several texts at once."""
    request, last = given.request, given.last
    tokens: list[Tensor] = [last]
    rows, usable, unusable = [], [], False
    for k in range(1, count + 1):
        suffix = torch.cat(tokens[1:]) if k > 1 else last[:0]
        logits = yield k, tokens[-1]
        q, good = given.laws.q(logits, given.vocab_size, given.committed, [suffix])
        if (request.adaptive or given.laws.look_at_text) and not bool(good):
            unusable = True  # and no processor is shown a text that could never come to be
            break
        if request.adaptive and stops_before(q, request):
            break
        tokens.append(propose(q, request, given.random))
        rows.append(q)
        usable.append(good)
        if request.draft_min_prob > 0 and float(q[0, tokens[-1]]) < request.draft_min_prob:
            break  # behind it, never without it: taking it back after seeing it would bend the law
    block = torch.stack(tokens, dim=1)
    if not rows:
        empty = last.new_zeros(1, 0, given.vocab_size, dtype=torch.float32)
        return Chain(block, empty, torch.zeros_like(last), unusable)
    # Only drafts from the first bad row on are dropped: dropping an earlier one because of a row that depends on it
    # would choose among samples after seeing them.
    lengths = torch.stack(usable, dim=1).long().cumprod(dim=1).sum(dim=1)
    return Chain(block, torch.stack(rows, dim=1), lengths, unusable)


def copy_chain(given: Drafting, drafts: Sequence[int]) -> Chain:
    """A chain of drafts that are a function of the committed text. Each was certain, so its q is one-hot."""
    tokens = given.last.new_tensor(drafts)
    q = torch.zeros(1, len(drafts), given.vocab_size, device=tokens.device)
    q.scatter_(2, tokens[None, :, None], 1.0)
    return Chain(torch.cat([given.last, tokens])[None], q, tokens.new_tensor([len(drafts)]), copied=True)


def propose(q: Tensor, request: Request, random: RandomSource) -> Tensor:
    """One draft [B] from q [B, V]."""
    return q.argmax(dim=-1) if request.greedy else random.categorical(q)


def stops_before(q: Tensor, request: Request) -> bool:
    """Whether q [1, V] is too unsure to draw from. The decision depends on what was drafted before, never on the draw.

    Both measures are confidences in the sense of EAGLE-2 (arXiv 2406.16858), section 3; the law is kept because the
    draft that is not made was not seen.
    """
    if request.draft_min_confidence > 0 and float(q.max()) < request.draft_min_confidence:
        return True
    most = request.draft_max_entropy
    return most is not None and float(torch.special.entr(q).sum()) > most
