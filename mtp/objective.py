"""The objective of a batch: losses summed over its supervised positions, in chunks, with the acceptance beside them.

Knows: how to reduce so that padding, packing, batch size, accumulation and ranks do not matter: everything is a sum
here, and whoever steps the optimiser divides by the number of supervised positions.
Refuses to know: shift arithmetic (it is handed a `TargetPlan`), where p comes from, and the optimiser.

Shapes: B batch, M anchors, N supervised teacher positions, C of them in a chunk, K draft position, D hidden, R = B*M*K
flat states of the heads, V vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mtp.losses import LossOptions, LossWeights, gradient, losses, position_weights
from mtp.targets import TargetPlan

Project = Callable[[Tensor], Tensor]


@dataclass
class Taught:
    """p over the draft vocabulary [C,Vd] and the draft id [C] of the base's argmax, -1 where the heads lack it."""

    p: Tensor
    top: Tensor


Teach = Callable[[Tensor], Taught]
"""From numbers of supervised teacher positions, long [C] in 0…N-1, to what the base says there."""


class LogitsTeacher:
    """p from the base's logits, computed when asked.

    Args:
        base_logits: flat positions [C] of the batch to logits [C,V].
        positions: flat position [N] of each teacher position.
        draft_ids: [Vd]; None is the whole vocabulary.
    """

    def __init__(self, base_logits: Callable[[Tensor], Tensor], positions: Tensor, draft_ids: Tensor | None) -> None:
        self.base_logits, self.positions, self.draft_ids = base_logits, positions, draft_ids

    def __call__(self, rows: Tensor) -> Taught:
        p = self.base_logits(self.positions[rows]).float().softmax(-1)
        if self.draft_ids is None:
            return Taught(p, p.argmax(-1))
        return Taught(p[:, self.draft_ids], to_draft(p.argmax(-1), self.draft_ids, p.shape[-1]))


def to_draft(tokens: Tensor, draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Base ids of any shape to draft ids, -1 for those outside the draft vocabulary."""
    if draft_ids is None:
        return tokens
    table = torch.full((vocab_size,), -1, device=tokens.device)
    table[draft_ids] = torch.arange(len(draft_ids), device=tokens.device)
    return table[tokens]


@dataclass
class DraftSums:
    """Sums over supervised positions, one entry per draft position: each [K], float64-safe to add across batches.

    `total` is the objective's sum, and the only one with a gradient; divide it by `positions`, and the rest by `count`.
    """

    total: Tensor
    positions: Tensor
    count: Tensor
    loss: Tensor
    alpha: Tensor
    greedy: Tensor
    top_mass: Tensor

    def detached(self) -> "DraftSums":
        """The same numbers without a graph, in float64."""
        return DraftSums(*(getattr(self, f.name).detach().double() for f in fields(self)))

    def __add__(self, other: "DraftSums") -> "DraftSums":
        return DraftSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def draft_sums(
    hidden: Tensor,
    plan: TargetPlan,
    project: Project,
    teach: Teach,
    targets: Tensor,
    options: LossOptions,
    weights: LossWeights | None = None,
    running: Tensor | None = None,
) -> DraftSums:
    """The objective and the acceptance statistics of one batch.

    hidden [B,M,K,D]: what `Heads.unroll` returned. project: to logits [...,Vd]. targets: draft ids [N] of the data's
    tokens. weights: those of this moment of training, None is the start's. running: alpha [K] that `lk` goes by, None
    is zero. The base is asked once per teacher position for all K, and at most `options.chunk` positions have logits at
    a time, also in the backward pass.
    """
    device, draft_length = hidden.device, hidden.shape[2]
    scale = position_weights(draft_length, options.decay).to(device)
    running = torch.zeros(draft_length, device=device) if running is None else running.float()
    now = options.at(0.0) if weights is None else weights
    chunks = torch.arange(len(plan.teacher), device=device).split(options.chunk)  # type: ignore[no-untyped-call]

    def one(picked: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        valid = (plan.hidden[rows] >= 0).float()
        logits = project(picked)
        with torch.no_grad():
            taught = teach(rows)
            found = losses(logits.float(), taught.p, targets[rows], now, running)
            stats = _statistics(found.q, found.alpha, found.loss, taught, valid)
            total = (found.loss * valid * scale).sum()
            if not picked.requires_grad:
                return total, stats, None
            slope = gradient(found.q, taught.p, targets[rows], now, running, valid * scale)
        return total, stats, torch.autograd.grad(logits, picked, slope.to(logits.dtype))[0]

    total, stats = _ChunkedSum.apply(hidden.flatten(0, 2), plan.hidden, one, chunks)  # type: ignore[no-untyped-call]
    count, loss, alpha, greedy, top_mass = stats
    positions = torch.tensor(float(len(plan.teacher)), device=device)
    return DraftSums(total, positions, count, loss, alpha, greedy, top_mass)


def _statistics(q: Tensor, alpha: Tensor, loss: Tensor, taught: Taught, valid: Tensor) -> Tensor:
    """[5,K] sums over a chunk: count, loss, alpha, greedy agreement, p(argmax q)."""
    q_top = q.argmax(-1)
    agree = (q_top == taught.top.unsqueeze(1)).float()
    return torch.stack([valid, loss * valid, alpha * valid, agree * valid, taught.p.gather(-1, q_top) * valid]).sum(1)


One = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


class _ChunkedSum(torch.autograd.Function):
    """Sum a function over chunks of rows, taking each chunk's gradient as soon as its value is known.

    Nothing of a chunk outlives it except the gradient to the flat hidden states [R,D]. This is what keeps memory
    independent of vocabulary x length x K; recomputing the projection in the backward pass would cost a third more.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, index: Tensor, one: One, chunks: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """flat [R,D], index [N,K] into R (-1: none); `one` maps states [C,K,D] and rows [C] to (sum, [5,K], slope)."""
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(flat) if needs_grad else None
        total = flat.new_zeros((), dtype=torch.float32)
        stats = flat.new_zeros(5, index.shape[1], dtype=torch.float32)
        for rows in chunks:
            where = index[rows].clamp(min=0)
            picked = flat.detach()[where].requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                value, seen, slope = one(picked, rows)
            if gradient is not None and slope is not None:
                # A state that is not there was masked out of the sum, so what it adds to row 0 is zero.
                gradient.index_add_(0, where.flatten(), slope.flatten(0, 1))
            total += value
            stats += seen
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_stats: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None
