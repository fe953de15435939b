"""The only place with shift arithmetic: which anchor and draft position reads, predicts and is taught by which token.

Knows: with 0-based positions, the features of anchor t already determine the base's own prediction of token t+1. Draft
position k = 1…K of anchor t reads token t+k, predicts token t+k+1, and its teacher is the base's distribution at
position t+k. Everything else in the project asks here.
Refuses to know: what the tokens mean, and how losses are computed.

Shapes: B batch, T position, M anchors, K draft position, N supervised teacher positions of the whole batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def draft_inputs(tokens: Tensor, draft_length: int) -> Tensor:
    """[B,T+K] to [B,T,K]: entry [b,t,k-1] is token t+k, which draft position k reads."""
    return tokens[:, 1:].unfold(1, draft_length, 1)


def take_anchors(values: Tensor, anchors: Tensor) -> Tensor:
    """Pick positions: values [B,T,...] at anchors [B,M] to [B,M,...]."""
    rows = torch.arange(len(anchors), device=anchors.device).unsqueeze(1)
    return values[rows, anchors]


def pad_for_drafts(tokens: Tensor, draft_length: int) -> Tensor:
    """[B,T] to [B,T+K]. What the padding holds does not matter: no supervised target reads it."""
    return torch.nn.functional.pad(tokens, (0, draft_length))


def first_drafts(supervised: Tensor, segments: Tensor | None = None) -> Tensor:
    """[B,T] bool: token t is supervised and can be a first draft, as its anchor t-2 is in the same text.

    `segments` [B,T]: which text of a packed row a token belongs to; None is one text per row.
    """
    possible = torch.zeros_like(supervised)
    possible[:, 2:] = supervised[:, 2:]
    if segments is not None:
        possible[:, 2:] &= (segments[:, 2:] == segments[:, :-2]) & (segments[:, 2:] > 0)
    return possible


def neighbours(tokens: Tensor, supervised: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Anchors t whose first draft, token t+2, is supervised: flat indices [N] of t and t+1 in [B*T], and token t+1."""
    row, position = first_drafts(supervised, segments)[:, 2:].nonzero(as_tuple=True)
    here = row * tokens.shape[1] + position
    return here, here + 1, tokens[row, position + 1]


@dataclass(frozen=True)
class TargetPlan:
    """Which hidden state of the heads meets which distribution of the base.

    Attributes:
        anchors: [B,M] positions to unroll, padded with repeats where a row has fewer.
        teacher: [N] flat index into [B*T] of each supervised teacher position s.
        tokens: [N] the data's token at s+1.
        hidden: [N,K] flat index into [B*M*K] of the head state of anchor s-k at draft position k, or -1 where that
            anchor does not exist or would draft from before the supervised span.
    """

    anchors: Tensor
    teacher: Tensor
    tokens: Tensor
    hidden: Tensor


def plan_targets(tokens: Tensor, supervised: Tensor, draft_length: int, segments: Tensor | None = None) -> TargetPlan:
    """Plan one batch from tokens [B,T] and supervised [B,T] (token s is a target that counts).

    An anchor t counts when its first draft, token t+2, is supervised: those are the anchors that decoding drafts from.
    With `segments` [B,T] a row holds several texts, and anchor, teacher and target are always of the same one.
    """
    length = tokens.shape[1]
    targets = first_drafts(supervised, segments)
    is_anchor = targets.roll(-2, 1)  # no target is at 0 or 1, so nothing comes round
    anchors, column = _pack(is_anchor)
    row, target = targets.nonzero(as_tuple=True)
    teacher = target - 1
    steps = torch.arange(1, draft_length + 1, device=tokens.device)
    anchor = teacher.unsqueeze(1) - steps  # [N,K]: s - k
    place = (row.unsqueeze(1), anchor.clamp(min=0))
    exists = (anchor >= 0) & is_anchor[place]
    if segments is not None:
        exists &= segments[place] == segments[row, target].unsqueeze(1)
    flat = (row.unsqueeze(1) * anchors.shape[1] + column[place]) * draft_length + steps - 1
    return TargetPlan(
        anchors=anchors,
        teacher=row * length + teacher,
        tokens=tokens[row, target],
        hidden=torch.where(exists, flat, -1),
    )


def _pack(is_anchor: Tensor) -> tuple[Tensor, Tensor]:
    """Move each row's anchors to the front: ([B,M] positions, [B,T] column of a position, valid at anchors only)."""
    column = is_anchor.long().cumsum(1) - 1
    width = max(int(is_anchor.sum(1).max()), 1)
    anchors = torch.zeros(len(is_anchor), width, dtype=torch.long, device=is_anchor.device)
    row, position = is_anchor.nonzero(as_tuple=True)
    anchors[row, column[row, position]] = position
    return anchors, column
