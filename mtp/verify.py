"""Acceptance rules for a chain of drafts: which drafts stay, and which token follows them.

Knows: probabilities and random draws. Refuses to know where the rows came from, what the text means, or when to stop.
Every rule is a pure function of its arguments and of the random source, and serves a whole batch at once.

Shapes: B batch, K draft position, V vocabulary. Row k of q is the law that draft k was drawn from; row k of p is the
law of the base at the same place, and row K of p (one more than q has) follows the last draft.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.errors import UserError
from mtp.sampling import RandomSource


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification."""

    num_accepted: Tensor
    """[B] how many leading drafts stay."""
    next_token: Tensor
    """[B] the recovered token after a rejection, or the bonus token when all drafts stay."""
    residual_empty: Tensor
    """[B] bool: the residual had no mass (rounding), so the recovered token came from p itself."""


Rule = Callable[[Tensor, Tensor, Tensor, RandomSource, Tensor], Verdict]


def verify(
    rule: str,
    draft_tokens: Tensor,
    q: Tensor,
    p: Tensor,
    random: RandomSource,
    lengths: Tensor | None = None,
) -> Verdict:
    """Apply `rule` to draft_tokens [B, K], q [B, K, V] and p [B, K + 1, V].

    `lengths` [B] says how many of the K drafts of a row count (default: all); what lies beyond is ignored, and the row
    of p after the last draft that counts gives its bonus token. K = 0 draws one token from p. An unknown rule is a
    UserError.
    """
    if rule not in RULES:
        raise UserError(f"--verify is {rule!r}; use one of {', '.join(sorted(RULES))}.")
    batch, drafts = draft_tokens.shape
    assert q.shape[:2] == (batch, drafts), (q.shape, draft_tokens.shape)
    assert p.shape[:2] == (batch, drafts + 1), (p.shape, draft_tokens.shape)
    assert p.shape[-1] == q.shape[-1] or drafts == 0, (p.shape, q.shape)
    if lengths is None:
        lengths = torch.full((batch,), drafts, device=draft_tokens.device)
    return RULES[rule](draft_tokens, q, p, random, lengths)


def token_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Judge drafts one by one: keep d while u < p(d) / q(d), then draw from norm(relu(p - q)). Exact.

    Leviathan et al. 2022 (arXiv 2211.17192), Algorithm 1; Chen et al. 2023 (arXiv 2302.01318), Algorithm 2.
    """
    p_drafts = at_tokens(p[:, : draft_tokens.shape[1]], draft_tokens)
    # Only the K picked values are widened: a ratio of two float32 numbers must not round up to 1.
    ratio = p_drafts.double() / at_tokens(q, draft_tokens).double()
    num_accepted = leading(random.bernoulli(ratio.clamp(max=1.0)), lengths)
    residual, empty = token_residual(q, p, num_accepted, lengths)
    return Verdict(num_accepted, random.categorical(residual), empty)


def greedy_rule(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Keep drafts while each is the base's likeliest token, then commit the likeliest. Exact for one-hot p (T = 0)."""
    del q, random
    best = p.argmax(dim=-1)  # [B, K + 1]
    num_accepted = leading(draft_tokens == best[:, :-1], lengths)
    next_token = best.gather(1, num_accepted[:, None]).squeeze(1)
    return Verdict(num_accepted, next_token, torch.zeros_like(num_accepted, dtype=torch.bool))


RULES: dict[str, Rule] = {"token": token_rule, "greedy": greedy_rule}


def token_residual(q: Tensor, p: Tensor, num_accepted: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [B, V] (float64, not normalised) of the token after `num_accepted` drafts, and where they fell back to p.

    relu(p - q) after a rejection, p itself after a full accept. Nothing is ever raised above 0: a token that p forbids
    stays impossible.
    """
    p_row = at_row(p, num_accepted).double()
    if q.shape[1] == 0:
        return p_row, torch.zeros_like(num_accepted, dtype=torch.bool)
    rejected = num_accepted < lengths
    q_row = at_row(q, num_accepted.clamp(max=q.shape[1] - 1)).double()
    residual = torch.where(rejected[:, None], (p_row - q_row).relu(), p_row)
    empty = residual.sum(dim=-1) <= 0
    return torch.where(empty[:, None], p_row, residual), empty


def at_tokens(probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, K]: probs [B, K, V] of tokens [B, K]."""
    return probs.gather(-1, tokens[..., None]).squeeze(-1)


def at_row(probs: Tensor, row: Tensor) -> Tensor:
    """[B, V]: row `row` [B] of probs [B, K, V]."""
    return probs[torch.arange(probs.shape[0], device=probs.device), row]


def leading(accepted: Tensor, lengths: Tensor) -> Tensor:
    """[B]: how many of accepted [B, K] hold before the first that does not, within lengths [B]."""
    counts = torch.arange(accepted.shape[1], device=accepted.device) < lengths[:, None]
    return (accepted & counts).long().cumprod(dim=1).sum(dim=1)
