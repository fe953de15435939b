"""The family of rules that accept or replace one draft, for study: what each does to the law, and how much it keeps.

Knows: p and q of one position, or of a few independent positions, as float64 rows. Refuses to know where they come
from, and to decode: decoding uses `mtp.verify`.

One position. Draw y ~ q, keep it with probability r(y), else draw from a. What comes out has the law

    law(y) = q(y) r(y) + a(y) P(reject),    P(reject) = 1 - sum q r.

It is p exactly if r(y) <= p(y) / q(y) wherever q(y) > 0 and a = (p - q r) / P(reject): solve law = p for a, and ask
that no entry be negative. So each r has one partner and no other, and p is the partner of min(1, p / q) only if q is
proportional to p wherever p > 0, as with p = q.

Shapes: V vocabulary, K drafts, N enumerated drafts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mtp.errors import UserError
from mtp.verify import at_tokens, block_thresholds, draft_ratios

MAX_DRAFTS = 200_000
"""The most drafts that `chain` enumerates."""
_EXACT = 1e-12  # total variation that rounding in float64 explains
_SUM_TOLERANCE = 1e-6  # people type rounded numbers
_CHUNK = 4_000_000  # numbers in memory at a time while enumerating


@dataclass(frozen=True)
class Study:
    """One rule at one position."""

    name: str
    law: Tensor
    """[V] what comes out."""
    total_variation: float
    p_accept: float
    exact: bool


def residual(p: Tensor, q: Tensor) -> Study:
    """r = min(1, p / q), a = norm(relu(p - q)); P(accept) = sum min(p, q) = 1 - TV(p, q), the most an exact r can keep.

    Leviathan et al. 2022 (arXiv 2211.17192), Algorithm 1.
    """
    keep = keep_ratio(p, q)
    return study("residual", p, q, keep, matching_resample(p, q, keep))


def resample_from_p(p: Tensor, q: Tensor) -> Study:
    """The usual mistake: r = min(1, p / q), a = p. Biased but for the q named above: law = min(p, q) + p P(reject)."""
    return study("resample from p", p, q, keep_ratio(p, q), p)


def corrected(p: Tensor, q: Tensor) -> Study:
    """r = A p / q, a = p. Exact, since q r = A p; r <= 1 asks for A <= A* = `best_constant`, and A = A* is best.

    Rejection sampling (von Neumann 1951) with the envelope q / A*, except that one draw from p ends it.
    """
    keep = torch.where(q > 0, best_constant(p, q) * p / q, 0.0).clamp(max=1.0)
    return study("resample from p, corrected", p, q, keep, p)


def scaled(p: Tensor, q: Tensor, scale: float) -> Study:
    """r = c min(1, p / q) with its own partner a: exact for each c in 0…1, and keeps c times what the residual does."""
    check_scale(scale)
    keep = scale * keep_ratio(p, q)
    return study(f"scaled by {scale:g}", p, q, keep, matching_resample(p, q, keep))


def check_scale(scale: float) -> None:
    """UserError outside 0…1."""
    if not 0 <= scale <= 1:
        raise UserError(f"--scale is {scale}; use a number from 0 to 1.")


def match(p: Tensor, q: Tensor) -> Study:
    """Draw y ~ q and z ~ p, commit z, count a kept draft if y = z: exact whatever q is; P(accept) = sum p q.

    In the family: r = p, and a = p (1 - q) / P(reject), the law of z where y differs from it.
    """
    return study("match", p, q, p, matching_resample(p, q, p))


def match_greedy(p: Tensor, q: Tensor) -> Study:
    """`match` with the likeliest token of q as the draft: P(accept) = p(argmax q)."""
    likeliest = one_hot(q.argmax(), len(q)).to(q.dtype)
    return study("match, greedy draft", p, likeliest, p, matching_resample(p, likeliest, p))


def all_rules(p: Tensor, q: Tensor, scale: float = 0.5) -> list[Study]:
    """Every member above for one p [V] and q [V]."""
    plain = [rule(p, q) for rule in (residual, resample_from_p, corrected, match, match_greedy)]
    return [*plain[:3], scaled(p, q, scale), *plain[3:]]


def study(name: str, p: Tensor, q: Tensor, keep: Tensor, resample: Tensor) -> Study:
    """Law and figures of any pair: keep = r [V], resample = a [V]."""
    kept = q * keep
    p_accept = float(kept.sum().clamp(max=1.0))
    law = kept + resample * (1 - p_accept)
    return Study(name, law, bias := total_variation(law, p), p_accept, bias <= _EXACT)


def keep_ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q) [V], and 0 where q never drafts."""
    return torch.where(q > 0, p / q, 0.0).clamp(max=1.0)


def best_constant(p: Tensor, q: Tensor) -> float:
    """A* = min of q / p over {p > 0}; 0 as soon as q leaves out one token that p can write."""
    return min(1.0, float((q[p > 0] / p[p > 0]).min()))


def matching_resample(p: Tensor, q: Tensor, keep: Tensor) -> Tensor:
    """The only a [V] that keeps the law of p beside a given r: (p - q r) / P(reject).

    UserError if r is above p / q or outside 0…1 somewhere: then no a does. Where nothing is ever rejected, p stands in.
    """
    if bool(((keep < 0) | (keep > 1)).any()):
        raise UserError("the acceptance probability r leaves 0…1; keep it inside.")
    left = p - q * keep
    if bool((left < -_EXACT).any()):
        token = int(left.argmin())
        raise UserError(
            f"no resampling law keeps p: at token {token}, r = {float(keep[token]):g} exceeds p / q = "
            f"{float(p[token] / q[token]):g}; use r <= p / q everywhere."
        )
    left = left.clamp(min=0.0)  # -1e-17 from rounding q (p / q)
    rejected = left.sum()
    return left / rejected if rejected > 0 else p


def total_variation(first: Tensor, second: Tensor) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * float((first - second).abs().sum())


def as_law(values: Sequence[float], option: str) -> Tensor:
    """[V] float64 that sums to 1 exactly; UserError unless `values` are at least two probabilities that sum to 1."""
    if len(values) < 2:
        raise UserError(f"{option} has {len(values)} number(s); give at least 2 with commas between: 0.4,0.6.")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise UserError(f"{option} has {value} at place {index + 1}; probabilities are 0 or more, and finite.")
    law = torch.tensor(values, dtype=torch.float64)
    total = float(law.sum())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise UserError(f"{option} sums to {total:g}; probabilities sum to 1 (within {_SUM_TOLERANCE:g}): change some.")
    return law / total


def derivation(p: Tensor, q: Tensor, name: Callable[[int], str] = str) -> list[str]:
    """The argument above in words, with the numbers of p and q put in; `name` turns a token into text."""
    kept = p.minimum(q)
    reject = float((p - q).relu().sum())
    law, partner = resample_from_p(p, q).law, matching_resample(p, q, keep_ratio(p, q))
    token = int(p.argmax() if total_variation(law, p) <= _EXACT else (law - p).abs().argmax())
    here, p_here, y = float(kept[token]), float(p[token]), f"y = {name(token)}"
    few = f"({', '.join(f'{value:.4g}' for value in partner[:8].tolist())})"
    few = few if len(p) <= 8 else f"largest at {name(int(partner.argmax()))}, {float(partner.max()):.4g}"
    few += ", which is p" if total_variation(partner, p) <= _EXACT else ", not p"
    unique = f"relu(p − q) / {reject:.4g} = {few}" if reject else "free: none is rejected"
    return [
        f"P(accept) = Σ min(p, q) = {1 - reject:.4g} = 1 − TV(p, q), so P(reject) = {reject:.4g}",
        f"residual: law = min(p, q) + relu(p − q) = p; at {y}: {here:.4g} + {p_here - here:.4g} = {p_here:.4g}",
        f"resample from p: law = min(p, q) + p · P(reject); at {y}: {here:.4g} + {p_here:.4g} · {reject:.4g} = "
        f"{float(law[token]):.4g}, where p has {p_here:.4g}",
        f"corrected: r = A* p/q with A* = min q/p = {best_constant(p, q):.4g}: it keeps that share of the drafts",
        f"one partner only: law = p gives a = (p − q r) / P(reject); for r = min(1, p/q) that is {unique}",
    ]


# ---- several drafts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """K drafts judged by the token rule and by the block rule, over all drafts there are."""

    drafts: int
    token: float
    """Expected accepted drafts; each step commits one token more."""
    block: float
    first_laws: tuple[Tensor, Tensor]
    """[V] law of the first committed token, by the token and by the block rule."""
    variations: tuple[float, float]
    """TV of the law of the next K tokens from that of the base alone, by both rules: 0 but for rounding."""


def chain(p: Tensor, q: Tensor, drafts: int) -> Chain:
    """Compare both rules with K = `drafts` where p and q do not depend on the context.

    p and q are [V], the same at each position, or [K, V]. All V^K drafts are visited and judged by the numbers of
    `mtp.verify`, so more than MAX_DRAFTS of them are a UserError.
    """
    vocab = p.shape[-1]
    if drafts < 1 or vocab**drafts > MAX_DRAFTS:
        raise UserError(f"K = {drafts} with V = {vocab} has V^K drafts; use K >= 1 and at most {MAX_DRAFTS:,} drafts.")
    p_rows, q_rows = p.expand(drafts, vocab), q.expand(drafts, vocab)
    token, block = _Tally(p_rows, q_rows), _Tally(p_rows, q_rows)
    for tokens, mass in _all_drafts(q_rows):
        p_batch = torch.cat([p_rows, p_rows[-1:]]).expand(len(tokens), -1, -1)
        q_batch, lengths = q_rows.expand(len(tokens), -1, -1), torch.full((len(tokens),), drafts)
        weights, thresholds = block_thresholds(tokens, q_batch, p_batch, lengths)
        ratios = draft_ratios(tokens, q_batch, p_batch, lengths)
        token.add(tokens, mass, token_survival(ratios), torch.ones_like(weights))
        block.add(tokens, mass, block_survival(thresholds), weights)
    truth = _outer(list(p_rows))
    first = [tally.law.reshape(vocab, -1).sum(dim=1) for tally in (token, block)]
    bias = [total_variation(tally.law, truth) for tally in (token, block)]
    return Chain(drafts, token.accepted, block.accepted, (first[0], first[1]), (bias[0], bias[1]))


def token_survival(ratios: Tensor) -> Tensor:
    """[N, K]: given the drafts, the chance that at least 1, 2, …, K stay by the token rule, from ratios p / q."""
    return ratios.clamp(max=1.0).cumprod(dim=1)


def block_survival(thresholds: Tensor) -> Tensor:
    """The same by the block rule: i drafts or more stay if any u_j < h_j with j >= i, so 1 - prod (1 - h_j)."""
    return 1 - (1 - thresholds).flip(1).cumprod(dim=1).flip(1)


def expected_accepted(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates [N] of expected accepted drafts by the token and by the block rule, from drafts [N, K] drawn from q.

    Unbiased. Averaged out in closed form: the uniforms, draft i in the token rule's chance to keep i, and the last
    draft in the gain of the block rule (linear in its ratio and threshold). q is [N, K, V], p [N, K + 1, V].
    """
    lengths, q_last, p_last = torch.full((len(tokens),), tokens.shape[1]), q[:, -1].double(), p[:, -2].double()
    ratios = draft_ratios(tokens, q, p, lengths)
    weights, thresholds = block_thresholds(tokens, q, p, lengths)
    one = torch.ones_like(weights[:, :1])
    before = torch.cat([one, weights], dim=1)[:, -2, None]
    ratios = torch.cat([ratios[:, :-1], q_last.minimum(p_last).sum(dim=1, keepdim=True)], dim=1)
    thresholds = torch.cat([thresholds[:, :-1], q_last.minimum(before * p_last).sum(dim=1, keepdim=True)], dim=1)
    survival = token_survival(ratios)
    gain = (block_survival(thresholds) - survival).sum(dim=1)
    alphas = q.minimum(p[:, :-1]).double().sum(dim=-1)
    token = (torch.cat([one, survival[:, :-1]], dim=1) * alphas).sum(dim=1)
    return token, token + gain


class _Tally:
    """Accepted drafts and the law [V^K] of the next K tokens, summed over drafts."""

    def __init__(self, p: Tensor, q: Tensor) -> None:
        self.p, self.q, self.accepted = p, q, 0.0
        self.law = p.new_zeros(p.shape[1] ** p.shape[0])

    def add(self, tokens: Tensor, mass: Tensor, survival: Tensor, weights: Tensor) -> None:
        """Drafts [N, K] of `mass` [N]; chances [N, K] to keep i or more; the weight [N, K] of p in their residuals."""
        self.accepted += float((mass[:, None] * survival).sum())
        one = torch.ones_like(mass)[:, None]
        reached, weights = torch.cat([one, survival, 0 * one], dim=1), torch.cat([one, weights], dim=1)
        for kept in range(tokens.shape[1] + 1):
            self._stop(kept, tokens, mass * (reached[:, kept] - reached[:, kept + 1]), weights[:, kept])

    def _stop(self, kept: int, tokens: Tensor, mass: Tensor, weight: Tensor) -> None:
        """Those that keep `kept` drafts: the next token follows the residual, and those behind it p."""
        drafts, vocab = tokens.shape[1], self.p.shape[1]
        places = torch.tensor([vocab ** (drafts - 1 - k) for k in range(drafts)])
        start = (tokens[:, :kept] * places[:kept]).sum(dim=1)
        if kept == drafts:
            self.law.index_add_(0, start, mass)
            return
        prefixes, which = torch.unique(start, return_inverse=True)  # drafts with one prefix share weight and residual
        shared = weight.new_zeros(len(prefixes)).scatter_(0, which, weight)
        left = (shared[:, None] * self.p[kept] - self.q[kept]).relu()
        total = left.sum(dim=1, keepdim=True)
        left = torch.where(total > 0, left / total, self.p[kept])
        left *= left.new_zeros(len(prefixes)).index_add_(0, which, mass)[:, None]
        rest = _outer(list(self.p[kept + 1 :]))
        blocks = self.law.view(-1, vocab * len(rest))
        blocks[prefixes // (vocab * len(rest))] += (left[:, :, None] * rest).flatten(1)


def _all_drafts(q: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """All drafts [N, K] that q [K, V] can make, with their probability [N], in chunks that fit the memory."""
    drafts, vocab = q.shape
    for numbers in torch.split(torch.arange(vocab**drafts), max(1, _CHUNK // (drafts * vocab))):
        tokens = torch.stack([numbers // vocab ** (drafts - 1 - k) % vocab for k in range(drafts)], dim=1)
        mass = at_tokens(q.expand(len(tokens), -1, -1), tokens).prod(dim=1)
        yield tokens[mass > 0], mass[mass > 0]


def _outer(rows: list[Tensor]) -> Tensor:
    """[V^n]: the product of n laws, the first one varying slowest."""
    law = torch.ones(1, dtype=torch.float64)
    for row in rows:
        law = (law[:, None] * row).reshape(-1)
    return law
