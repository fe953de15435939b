"""What heads are trained on, per position: q against p and against the data, with values and gradients in closed form.

Knows: the losses with formula and source, their gradients to the logits, the weights between them, and how weights
change over training.
Refuses to know: which position is taught by which (`mtp.targets`), how positions are summed (`mtp.objective`), the base
and the optimiser.

Shapes: C teacher positions, K draft position, Vd draft vocabulary.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from mtp.errors import UserError

LK_DECAY = 3.0  # of the share of KL in `lk`; the paper's value


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The objective of one draft position: kl * KL + ce * CE + tv * TV + lk * LK.

    Args:
        kl: weight of the divergence from the base, p ln(p/q).
        ce: weight of the cross-entropy to the data's token.
        tv: weight of the total variation 1 - sum of min(p, q): the rejection rate itself. Its gradient is weak while q
            is poor.
        lk: weight of the hybrid s * KL + (1 - s) * TV with s = exp(-3 alpha): KL while q is poor, the rejection rate
            when it is good. alpha is the running acceptance of the draft position.
    """

    kl: float = 0.0
    ce: float = 0.0
    tv: float = 0.0
    lk: float = 0.0

    def check(self, where: str) -> None:
        """UserError unless no weight is negative and one is positive."""
        weights = {f.name: getattr(self, f.name) for f in fields(LossWeights)}
        if not all(0 <= weight < float("inf") for weight in weights.values()) or not any(weights.values()):
            told = ", ".join(f"{where}.{name} is {value}" for name, value in weights.items())
            raise UserError(f"{told}; none may be below 0 or infinite, and one must be above 0.")


@dataclass(frozen=True, kw_only=True)
class LossOptions(LossWeights):
    """The objective: sum over k of decay^(k-1) times the weighted losses, position weights normalised to one.

    Args:
        kl: weight of the divergence from the base, p ln(p/q).
        ce: weight of the cross-entropy to the data's token.
        tv: weight of the total variation 1 - sum of min(p, q), the rejection rate itself.
        lk: weight of the hybrid s * KL + (1 - s) * TV with s = exp(-3 alpha), arXiv 2602.23881.
        final: the weights at the end of training; null keeps those above throughout.
        blend: shares of training between which the weights go over, linearly, to `final`.
        decay: weight of draft position k+1 relative to k, in (0, 1].
        chunk: how many teacher positions have their logits in memory at once.
    """

    kl: float = 1.0
    final: LossWeights | None = None
    blend: tuple[float, float] = (0.5, 0.5)
    decay: float = 0.8
    chunk: int = 256

    def __post_init__(self) -> None:
        self.check("loss")
        if self.final is not None:
            self.final.check("loss.final")
        if not 0 <= self.blend[0] <= self.blend[1] <= 1:
            raise UserError(f"loss.blend is {list(self.blend)}; two rising shares of training, 0 to 1, are needed.")
        if not 0 < self.decay <= 1:
            raise UserError(f"loss.decay is {self.decay}; it must be in (0, 1].")
        if self.chunk < 1:
            raise UserError(f"loss.chunk is {self.chunk}; it must be at least 1.")

    def at(self, progress: float) -> LossWeights:
        """The weights when that share of training, 0…1, is done."""
        end = self if self.final is None else self.final
        low, high = self.blend
        share = float(progress >= high) if progress >= high or progress <= low else (progress - low) / (high - low)
        names = [f.name for f in fields(LossWeights)]
        return LossWeights(**{n: (1 - share) * getattr(self, n) + share * getattr(end, n) for n in names})


def position_weights(draft_length: int, decay: float) -> Tensor:
    """[K] weights proportional to decay^(k-1) that sum to one. EAGLE-3 and FastMTP weigh later positions less."""
    unscaled = torch.full((draft_length,), decay).cumprod(0)
    weights: Tensor = torch.nn.functional.normalize(unscaled, p=1.0, dim=0)
    return weights


def kl_to_base(p: Tensor, log_q: Tensor) -> Tensor:
    """Sum over the draft vocabulary of p ln(p'/q), with p' = p renormalised there: p [C,Vd], ln q [C,K,Vd] to [C,K].

    Base mass outside the draft vocabulary cannot be learned; it scales the position down instead of being pretended
    away. The gradient to the logits is mass * q - p. On the whole vocabulary this is KL(p || q), Hinton et al. 2015.
    """
    mass = p.sum(-1)
    own = torch.special.entr(mass) - torch.special.entr(p).sum(-1)  # sum of p ln(p / mass), with 0 ln 0 = 0
    divergence: Tensor = own.unsqueeze(1) - torch.einsum("cv,ckv->ck", p.to(log_q.dtype), log_q)
    return divergence


def cross_entropy(log_q: Tensor, targets: Tensor) -> Tensor:
    """-ln q(x) of draft ids `targets` [...], 0 where the id is -1 (a token the heads cannot propose)."""
    picked = log_q.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets >= 0, -picked, torch.zeros_like(picked))


def acceptance(p: Tensor, q: Tensor) -> Tensor:
    """alpha = sum over x of min(p, q), [...,Vd] to [...]: P(accept), Leviathan et al. 2022, Theorem 3.5.

    With p the base's full distribution restricted to the draft vocabulary, mass outside it counts as rejected.
    """
    return torch.minimum(p, q).sum(-1)


def lk_share(alpha: Tensor) -> Tensor:
    """s = exp(-3 alpha): the share of KL in `lk`, by the running acceptance [K]. arXiv 2602.23881."""
    return (-LK_DECAY * alpha).exp()


def kl_and_tv(weights: LossWeights, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [K] of KL and of TV once `lk` is split by the running acceptance alpha [K]."""
    share = lk_share(alpha)
    return weights.kl + weights.lk * share, weights.tv + weights.lk * (1 - share)


@dataclass
class Losses:
    """Per teacher position and draft position: the weighted loss and alpha, each [C,K], and what a gradient needs."""

    loss: Tensor
    alpha: Tensor
    q: Tensor


def losses(logits: Tensor, p: Tensor, targets: Tensor, weights: LossWeights, running: Tensor) -> Losses:
    """Logits [C,K,Vd] of the heads, p [C,Vd], draft ids [C] of the data's tokens (-1: none), running alpha [K]."""
    log_q = logits.log_softmax(-1)
    q, shared = log_q.exp(), p.unsqueeze(1)
    alpha = acceptance(shared, q)
    kl, tv = kl_and_tv(weights, running)
    loss = kl * kl_to_base(p, log_q) + tv * (1 - alpha)
    if weights.ce:
        loss = loss + weights.ce * cross_entropy(log_q, targets.unsqueeze(1).expand(alpha.shape))
    return Losses(loss, alpha, q)


def gradient(q: Tensor, p: Tensor, targets: Tensor, weights: LossWeights, running: Tensor, scale: Tensor) -> Tensor:
    """d sum(scale * loss) / d logits [C,K,Vd] of `losses`, written over q, in closed form; scale [C,K].

    Per position, with 1[.] an indicator: KL: mass * q - p. CE: q - 1[x]. TV: q * (sum of q 1[q<p]) - q 1[q<p].
    Three times as fast as going back through log-softmax and gather, whose gradients are tensors of their own.
    """
    kl, tv = kl_and_tv(weights, running)
    mass = p.sum(-1, keepdim=True)
    pull = (scale * kl).unsqueeze(-1) * p.unsqueeze(1)
    own = kl * mass
    if bool((tv > 0).any()):
        below = torch.where(q < p.unsqueeze(1), q, 0.0)
        own = own + tv * below.sum(-1)
        pull += below.mul_((scale * tv).unsqueeze(-1))
    if weights.ce:
        known = (targets >= 0).unsqueeze(1) * scale * weights.ce
        where = targets.clamp(min=0).view(-1, 1, 1).expand(*scale.shape, 1)
        pull.scatter_add_(-1, where, known.unsqueeze(-1).to(pull.dtype))
        own = own + weights.ce * (targets >= 0).unsqueeze(1)
    return q.mul_((own * scale).unsqueeze(-1)).sub_(pull)
