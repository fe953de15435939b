"""What the heads are trained on: q against p and against the data, per draft position, in chunks.

Knows: the per-position losses with formula and source, the position weights, and how to reduce them so that padding,
batch size and accumulation do not matter: everything is a sum here, and whoever steps the optimiser divides by the
number of supervised positions.
Refuses to know: shift arithmetic (it is handed a `TargetPlan`), the base, and the optimiser.

Shapes: N supervised teacher positions, C of them in a chunk, K draft position, D hidden, V vocabulary, Vd draft
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mtp.errors import UserError
from mtp.targets import TargetPlan

Project = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The objective: sum over k of decay^(k-1) (kl * KL + ce * CE + tv * TV), position weights normalised to one.

    Args:
        kl: weight of the divergence from the base, p ln(p/q).
        ce: weight of the cross-entropy to the data's token.
        tv: weight of the total variation 1 - sum of min(p, q): the rejection rate itself. Its gradient is weak while q
            is poor.
        decay: weight of draft position k+1 relative to k, in (0, 1].
        chunk: how many teacher positions have their V logits in memory at once.
    """

    kl: float = 1.0
    ce: float = 0.0
    tv: float = 0.0
    decay: float = 0.8
    chunk: int = 256

    def __post_init__(self) -> None:
        weights = {"kl": self.kl, "ce": self.ce, "tv": self.tv}
        if min(weights.values()) < 0 or not any(weights.values()):
            told = ", ".join(f"loss.{name} is {value}" for name, value in weights.items())
            raise UserError(f"{told}; none may be below 0 and one must be above 0.")
        if not 0 < self.decay <= 1:
            raise UserError(f"loss.decay is {self.decay}; it must be in (0, 1].")
        if self.chunk < 1:
            raise UserError(f"loss.chunk is {self.chunk}; it must be at least 1.")


def position_weights(draft_length: int, decay: float) -> Tensor:
    """[K] weights proportional to decay^(k-1) that sum to one. EAGLE-3 and FastMTP weigh later positions less."""
    unscaled = torch.full((draft_length,), decay).cumprod(0)
    weights: Tensor = torch.nn.functional.normalize(unscaled, p=1.0, dim=0)
    return weights


def kl_to_base(p: Tensor, log_q: Tensor) -> Tensor:
    """Sum over the draft vocabulary of p ln(p'/q), with p' = p renormalised there: [...,Vd] to [...].

    Base mass outside the draft vocabulary cannot be learned; it scales the position down instead of being pretended
    away. The gradient to the logits is mass * q - p. On the whole vocabulary this is KL(p || q), Hinton et al. 2015.
    """
    mass = p.sum(-1, keepdim=True)
    own = torch.where(p > 0, p * (p / mass.clamp(min=torch.finfo(p.dtype).tiny)).log(), 0.0)  # 0 ln 0 = 0
    return (own - p * log_q).sum(-1)


def cross_entropy(log_q: Tensor, targets: Tensor) -> Tensor:
    """-ln q(x) of draft ids `targets` [...], 0 where the id is -1 (a token the heads cannot propose)."""
    picked = log_q.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets >= 0, -picked, torch.zeros_like(picked))


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """alpha = sum over x of min(p, q), [...,Vd] to [...]: P(accept), Leviathan et al. 2022, Theorem 3.5.

    With p the base's full distribution restricted to the draft vocabulary, mass outside it counts as rejected.
    """
    return torch.minimum(p, q).sum(-1)


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
    base_logits: Callable[[Tensor], Tensor],
    draft_ids: Tensor | None,
    options: LossOptions,
) -> DraftSums:
    """The objective and the acceptance statistics of one batch.

    hidden [B,M,K,D]: what `Heads.unroll` returned. project: to logits [...,Vd]. base_logits: flat teacher positions
    [C] to the base's logits [C,V]. The base's distribution is computed once per teacher position and shared by all K,
    and at most `options.chunk` positions have logits at a time, also in the backward pass.
    """
    weights = position_weights(hidden.shape[2], options.decay).to(hidden.device)
    chunks = torch.arange(len(plan.teacher), device=hidden.device).split(options.chunk)  # type: ignore[no-untyped-call]

    def one(picked: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        valid = plan.hidden[rows] >= 0
        log_q = project(picked).float().log_softmax(-1)
        with torch.no_grad():
            p, top, targets = _teacher(base_logits(plan.teacher[rows]), plan.tokens[rows], draft_ids)
            p, top, targets = (x.unsqueeze(1).expand(-1, log_q.shape[1], *x.shape[1:]) for x in (p, top, targets))
        loss = options.kl * kl_to_base(p, log_q)
        if options.ce:
            loss = loss + options.ce * cross_entropy(log_q, targets)
        if options.tv:
            loss = loss + options.tv * (1 - acceptance(p, log_q.exp()))
        loss = loss * valid
        with torch.no_grad():
            q_top = log_q.argmax(-1)
            seen = [acceptance(p, log_q.exp()), (q_top == top).float(), p.gather(-1, q_top.unsqueeze(-1)).squeeze(-1)]
            stats = torch.stack([valid.float(), loss, *(x * valid for x in seen)]).sum(1)
        return (loss.sum(0) * weights).sum(), stats

    flat = hidden.flatten(0, 2)
    total, stats = _ChunkedSum.apply(flat, plan.hidden, one, chunks)  # type: ignore[no-untyped-call]
    count, loss, alpha, greedy, top_mass = stats
    positions = torch.tensor(float(len(plan.teacher)), device=hidden.device)
    return DraftSums(total, positions, count, loss, alpha, greedy, top_mass)


def _teacher(logits: Tensor, tokens: Tensor, draft_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Base logits [C,V] and data tokens [C] to p over the draft vocabulary [C,Vd], draft ids [C] of p's argmax and of
    the tokens; -1 where outside the draft vocabulary."""
    p = logits.float().softmax(-1)
    top = p.argmax(-1)
    if draft_ids is None:
        return p, top, tokens
    to_draft = torch.full((p.shape[-1],), -1, device=p.device)
    to_draft[draft_ids] = torch.arange(len(draft_ids), device=p.device)
    return p[:, draft_ids], to_draft[top], to_draft[tokens]


class _ChunkedSum(torch.autograd.Function):
    """Sum a function over chunks of rows, taking each chunk's gradient as soon as its value is known.

    Nothing of a chunk outlives it except the gradient to the flat hidden states [R,D]. This is what keeps memory
    independent of vocabulary x length x K; recomputing the projection in the backward pass would cost a third more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        flat: Tensor,
        index: Tensor,
        one: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        chunks: tuple[Tensor, ...],
    ) -> tuple[Tensor, Tensor]:
        """flat [R,D], index [N,K] into R (-1: none); `one` maps states [C,K,D] and rows [C] to (sum, [5,K])."""
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.zeros_like(flat) if needs_grad else None
        total = flat.new_zeros((), dtype=torch.float32)
        stats = flat.new_zeros(5, index.shape[1], dtype=torch.float32)
        for rows in chunks:
            where = index[rows].clamp(min=0)
            picked = flat.detach()[where].requires_grad_(needs_grad)
            with torch.set_grad_enabled(needs_grad):
                value, seen = one(picked, rows)
            if gradient is not None:
                # A state that is not there was masked out of `value`, so what it adds to row 0 is zero.
                gradient.index_add_(0, where.flatten(), torch.autograd.grad(value, picked)[0].flatten(0, 1))
            total += value.detach()
            stats += seen
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(stats)
        return total, stats

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_stats: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad_total, None, None, None
