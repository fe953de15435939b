"""Acceptance rules for a chain of drafts: which drafts stay, and which token follows them.

Knows: probabilities and random draws. Refuses to know where the rows came from, what the text means, or when to stop.
Every rule is a pure function of its arguments and of the random source, and serves a whole batch at once. All are exact
(the text follows p) but the one whose name begins with `lossy`.

Shapes: B batch, K draft position, V vocabulary. Row k of q is the law that draft k was drawn from; row k of p is the
law of the base at the same place, and row K of p (one more than q has) follows the last draft.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.errors import UserError
from mtp.sampling import RandomSource
from mtp.suggest import did_you_mean


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification."""

    num_accepted: Tensor
    """[B] how many leading drafts stay."""
    next_token: Tensor
    """[B] the recovered token after a rejection, or the bonus token when all drafts stay."""
    residual_empty: Tensor
    """[B] bool: the residual had no mass (rounding), so the recovered token came from p itself."""


_TYPICAL_EPSILON, _TYPICAL_DELTA = 0.09, 0.3
Rule = Callable[[Tensor, Tensor, Tensor, RandomSource, Tensor], Verdict]


def verify(
    rule: str | Rule,
    draft_tokens: Tensor,
    q: Tensor,
    p: Tensor,
    random: RandomSource,
    lengths: Tensor | None = None,
) -> Verdict:
    """Apply `rule`, a name or a function, to draft_tokens [B, K], q [B, K, V] and p [B, K + 1, V].

    `lengths` [B] says how many of the K drafts of a row count (default: all); what lies beyond is ignored, and the row
    of p after the last draft that counts gives its bonus token. K = 0 draws one token from p. An unknown rule is a
    UserError.
    """
    if isinstance(rule, str):
        check_rule(rule)
        rule = RULES[rule]
    batch, drafts = draft_tokens.shape
    assert q.shape[:2] == (batch, drafts), (q.shape, draft_tokens.shape)
    assert p.shape[:2] == (batch, drafts + 1), (p.shape, draft_tokens.shape)
    assert p.shape[-1] == q.shape[-1] or drafts == 0, (p.shape, q.shape)
    if lengths is None:
        lengths = torch.full((batch,), drafts, device=draft_tokens.device)
    return rule(draft_tokens, q, p, random, lengths)


def check_rule(rule: str) -> None:
    """UserError unless `rule` is one of RULES."""
    if rule not in RULES:
        raise UserError(f"--verify is {rule!r}; {did_you_mean(rule, sorted(RULES))}")


def token_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Judge drafts one by one: keep d while u < p(d) / q(d), then draw from norm(relu(p - q)). Exact.

    Leviathan et al. 2022 (arXiv 2211.17192), Algorithm 1; Chen et al. 2023 (arXiv 2302.01318), Algorithm 2.
    """
    ratio = draft_ratios(draft_tokens, q, p, lengths)
    num_accepted = leading(random.bernoulli(ratio.clamp(max=1.0)), lengths)
    residual, empty = token_residual(q, p, num_accepted, lengths)
    return Verdict(num_accepted, random.categorical(residual), empty)


def block_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Judge the drafts as one block: the longest prefix that passes stays, even behind one that does not. Exact.

    It keeps at least as many drafts as the token rule in expectation, and the same number at K = 1. Sun et al., ICLR
    2025 (arXiv 2403.10444), Algorithm 2.
    """
    weights, thresholds = block_thresholds(draft_tokens, q, p, lengths)
    num_accepted = last_passing(random.bernoulli(thresholds), lengths)
    weight = at_row(torch.cat([weights.new_ones(len(weights), 1), weights], dim=1), num_accepted)
    residual, empty = token_residual(q, p, num_accepted, lengths, weight)
    return Verdict(num_accepted, random.categorical(residual), empty)


def match_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Draw every position from p; drafts stay while they equal the draw, and the first other draw is committed. Exact.

    q plays no part. Keeps a draft with probability sum_x p(x) q(x), or more when draft and draw share their noise
    (`mtp.keyed`). Drawing again after a mismatch would bend the law.
    """
    del q
    draws = random.categorical(p)  # [B, K + 1]
    num_accepted = leading(draft_tokens == draws[:, :-1], lengths)
    return Verdict(num_accepted, at_row(draws, num_accepted), torch.zeros_like(num_accepted, dtype=torch.bool))


def greedy_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Keep drafts while each is the base's likeliest token, then commit the likeliest. Exact for one-hot p (T = 0)."""
    del q, random
    best = p.argmax(dim=-1)  # [B, K + 1]
    num_accepted = leading(draft_tokens == best[:, :-1], lengths)
    return Verdict(num_accepted, at_row(best, num_accepted), torch.zeros_like(num_accepted, dtype=torch.bool))


def lossy_typical_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Keep drafts that p does not find unlikely: p(d) > min(eps, delta exp(-H(p))), then draw from p. **Lossy.**

    Cai et al. 2024 (arXiv 2401.10774), section 2.3.2, with the constants of its code, eps = 0.09 and delta = 0.3. The
    text does not follow p: likely drafts are kept more often than p would draw them.
    """
    del q
    rows = p[:, : draft_tokens.shape[1]]
    entropy = torch.special.entr(rows).sum(dim=-1)  # nats
    bar = (_TYPICAL_DELTA * (-entropy).exp()).clamp(max=_TYPICAL_EPSILON)
    num_accepted = leading(at_tokens(rows, draft_tokens) > bar, lengths)
    next_token = random.categorical(at_row(p, num_accepted))
    return Verdict(num_accepted, next_token, torch.zeros_like(num_accepted, dtype=torch.bool))


RULES: dict[str, Rule] = {
    "block": block_rule,
    "greedy": greedy_rule,
    "lossy-typical": lossy_typical_rule,
    "match": match_rule,
    "token": token_rule,
}
EXACT_RULES = ("block", "token", "match", "greedy")
"""Those that keep the law of p; greedy for one-hot p only."""


def draft_ratios(draft_tokens: Tensor, q: Tensor, p: Tensor, lengths: Tensor) -> Tensor:
    """p(d) / q(d) of every draft, [B, K] float64; may exceed 1, and is 0 for drafts that do not count."""
    # Only the K picked values are widened: a ratio of two float32 numbers must not round up to 1.
    p_drafts = at_tokens(p[:, : draft_tokens.shape[1]], draft_tokens).double()
    ratios = p_drafts / at_tokens(q, draft_tokens).double()
    return torch.where(within(lengths, draft_tokens.shape[1]), ratios, 0.0)


def block_thresholds(draft_tokens: Tensor, q: Tensor, p: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Weights P_i and thresholds h_i of the block rule, both [B, K] float64.

    P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i)); with S_i = sum_x relu(P_i p_{i+1}(x) - q_{i+1}(x)), h_i =
    S_i / (S_i + 1 - P_i), and h = P at the last draft that counts: behind it, there is nothing to compare with.
    """
    batch, drafts = draft_tokens.shape
    ratios, columns, weight = draft_ratios(draft_tokens, q, p, lengths), [], p.new_ones(batch, dtype=torch.float64)
    for k in range(drafts):
        weight = (weight * ratios[:, k]).clamp(max=1.0)
        columns.append(weight)
    if not drafts:
        return ratios, ratios
    weights = torch.stack(columns, dim=1)
    inner = weights[:, :-1]
    gain = (inner.to(p.dtype)[..., None] * p[:, 1:drafts]).sub_(q[:, 1:]).relu_().sum(dim=-1).double()
    below = gain + (1 - inner)  # in this order: a tiny gain must not be lost to the 1
    thresholds = torch.cat([torch.where(below > 0, gain / below, 1.0), weights[:, -1:]], dim=1)
    last = torch.arange(1, drafts + 1, device=p.device) == lengths[:, None]
    return weights, torch.where(last, weights, thresholds)


def token_residual(
    q: Tensor, p: Tensor, num_accepted: Tensor, lengths: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Masses [B, V] (not normalised) of the token after `num_accepted` drafts, and where they fell back to p.

    relu(w p - q) after a rejection, p itself after a full accept; w [B] is 1 by the token rule, and P of the last kept
    draft by the block rule. Nothing is ever raised above 0: a token that p forbids stays impossible.
    """
    p_row = at_row(p, num_accepted)
    if q.shape[1] == 0:
        return p_row, torch.zeros_like(num_accepted, dtype=torch.bool)
    rejected = num_accepted < lengths
    q_row = at_row(q, num_accepted.clamp(max=q.shape[1] - 1))
    share = torch.ones_like(num_accepted) if weight is None else torch.where(rejected, weight, 1.0)
    share = share.to(p.dtype)
    # In place: the rows are long, and every copy of them is read from memory again.
    residual = (p_row * share[:, None]).sub_(q_row.masked_fill_(~rejected[:, None], 0.0)).relu_()
    empty = residual.sum(dim=-1) <= 0
    return residual.addcmul_(p_row, empty.to(p.dtype)[:, None]), empty


def at_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, K]: probs [B, K, V] of tokens [B, K]."""
    return probs.gather(-1, tokens[..., None]).squeeze(-1)


def at_row(values: Tensor, row: Tensor) -> Tensor:
    """[B, ...]: entry `row` [B] of values [B, K, ...]."""
    return values[torch.arange(values.shape[0], device=values.device), row]


def leading(accepted: Tensor, lengths: Tensor) -> Tensor:
    """[B]: how many of accepted [B, K] hold before the first that does not, within lengths [B]."""
    return (accepted & within(lengths, accepted.shape[1])).long().cumprod(dim=1).sum(dim=1)


def last_passing(passed: Tensor, lengths: Tensor) -> Tensor:
    """[B]: the number of the last of passed [B, K] that holds, counted from 1, within lengths [B]; 0 if none does."""
    if not passed.shape[1]:
        return torch.zeros_like(lengths)
    numbers = torch.arange(1, passed.shape[1] + 1, device=passed.device)
    return ((passed & within(lengths, passed.shape[1])).long() * numbers).amax(dim=1)


def within(lengths: Tensor, drafts: int) -> Tensor:
    """[B, K] bool: which of K drafts count, given how many of each row do."""
    return torch.arange(drafts, device=lengths.device) < lengths[:, None]
