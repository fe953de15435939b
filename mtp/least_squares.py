"""A closed-form start: recurrent heads that draft usefully before the first gradient step.

The base's final state at the next position is, to a good part, a linear function of what the heads read. With y_t the
state after the final norm at position t, e_t the embedding of token t, n() a norm without weight and h_t the features:

    y_{t+1} ~ y_t + M [n(e_{t+1}) ; n(y_t)],   rank(M) <= J E          (one step of the block)
    y_{t+1} ~ C h_t + M [n(e_{t+1}) ; n(y_t)]                          (the first step)

M and C are ridge regressions over a few thousand positions, M of reduced rank (Izenman 1975). The block computes them
exactly: every attention head starts looking at its own position, the values and `o_proj` are the factors of M, `fc` is
C, the MLP adds nothing, and the state g lives where the base's output matrix reads.

Knows: recurrent heads and second moments. Refuses to know: where states come from, and gradients.

Shapes: N positions, F features, D hidden, J key-value heads, G query heads per key-value head, E head size.
"""

import torch
from torch import Tensor, nn

from mtp.heads import RecurrentHeads

RIDGE = 1e-4  # of the mean squared input; small because thousands of positions stand against it
ATTENTION_GAP = 64.0  # how much higher an own position scores than any other: nothing is left for the others
FAR = 4096  # positions over which the gap is checked


class Moments:
    """Second moments of z = [h_t ; n(e_{t+1}) ; n(y_t)] with itself and with the states, summed over positions."""

    def __init__(self, heads: RecurrentHeads) -> None:
        self.heads = heads
        width, size = heads.config.feature_size + 2 * heads.config.hidden_size, heads.config.hidden_size
        self.inputs = torch.zeros(width, width, dtype=torch.float64)
        self.state = torch.zeros(width, size, dtype=torch.float64)
        self.next_state = torch.zeros(width, size, dtype=torch.float64)
        self.sums = torch.zeros(width, dtype=torch.float64)
        self.count = 0

    @torch.no_grad()
    def add(self, features: Tensor, states: Tensor, next_tokens: Tensor, next_states: Tensor) -> None:
        """Take in positions: features [N,F], y_t [N,D], token t+1 [N], y_{t+1} [N,D]."""
        z = torch.cat(
            [features.float(), unit(self.heads.embed(next_tokens).float()), unit(states.float())],
            dim=-1,
        )
        self.inputs += (z.T @ z).double().cpu()
        self.state += (z.T @ states.float()).double().cpu()
        self.next_state += (z.T @ next_states.float()).double().cpu()
        self.sums += z.sum(0).double().cpu()
        self.count += len(z)


def unit(x: Tensor) -> Tensor:
    """n(x): root mean square one along the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def ridge(gram: Tensor, cross: Tensor) -> Tensor:
    """argmin over W of |X W - Y|^2 + RIDGE tr(X'X)/n |W|^2, from X'X [n,n] and X'Y [n,m]."""
    penalty = RIDGE * gram.diagonal().mean().clamp(min=1e-12) * torch.eye(len(gram), dtype=gram.dtype)
    solution: Tensor = torch.linalg.solve(gram + penalty, cross)
    return solution


def reduced_rank(gram: Tensor, cross: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Ridge regression of rank at most `rank`: factors [n,r] and [r,m] whose product replaces `ridge`.

    The fitted values are projected on their leading principal directions. Izenman 1975, Journal of Multivariate
    Analysis 5, 248-264.
    """
    full = ridge(gram, cross)
    directions = torch.linalg.eigh(full.T @ gram @ full).eigenvectors[:, -rank:]
    return full @ directions, directions.T


@torch.no_grad()
def start_from_states(heads: RecurrentHeads, moments: Moments) -> None:
    """Set the heads' weights to the closed-form start (see the module)."""
    assert moments.count, "add() positions first"
    features, block = heads.config.feature_size, heads.attention.shape
    gram, a = moments.inputs, slice(features, None)
    rank = min(block.num_key_value_heads * block.head_dim, heads.config.hidden_size)
    down, up = reduced_rank(gram[a, a], (moments.next_state - moments.state)[a], rank)
    step = down @ up
    fc = ridge(gram[:features, :features], moments.next_state[:features] - gram[:features, a] @ step)
    heads.fc.weight.copy_(fc.T)
    _set_attention(heads, down, up, ridge(gram[a, a], moments.sums[a].unsqueeze(1)).squeeze(1))
    nn.init.zeros_(heads.mlp.down_proj.weight)
    for norm in (heads.embed_norm, heads.hidden_norm, heads.mlp_norm):
        nn.init.ones_(norm.weight)
    weights = torch.cat([fc, step])  # from z to the state after the first step
    power = ((weights.T @ gram) * weights.T).sum() / (moments.count * heads.config.hidden_size)
    nn.init.constant_(heads.norm.weight, float(power.sqrt()))


def _set_attention(heads: RecurrentHeads, down: Tensor, up: Tensor, one: Tensor) -> None:
    """Values and output are the factors [2D,r], [r,D] of M; queries and keys are made of `one` [2D]: inputs to ~1."""
    attention, block = heads.attention, heads.attention.shape
    groups = block.num_attention_heads // block.num_key_value_heads
    rank = down.shape[1]
    nn.init.zeros_(attention.v_proj.weight)
    attention.v_proj.weight[:rank] = down.T.to(attention.v_proj.weight)
    spread = torch.zeros(block.num_key_value_heads * block.head_dim, heads.config.hidden_size, dtype=up.dtype)
    spread[:rank] = up / groups
    per_head = spread.view(block.num_key_value_heads, 1, block.head_dim, -1).expand(-1, groups, -1, -1)
    attention.o_proj.weight.copy_(per_head.reshape(-1, heads.config.hidden_size).T)
    pairs, gap = sharpest_pairs(block.head_dim, block.rope_theta)
    height = (ATTENTION_GAP / gap * block.head_dim**0.5) ** 0.5
    for projection in (attention.q_proj, attention.k_proj):
        rows = projection.weight.view(-1, block.head_dim, projection.weight.shape[1])
        half = block.head_dim // 2
        rows[:, :pairs] = height * one.to(rows)
        rows[:, half : half + pairs] = 0.0


def sharpest_pairs(head_dim: int, theta: float) -> tuple[int, float]:
    """How many of the fastest rotary pairs to use for attention to the own position, and the gap they give.

    With constant queries and keys of height one, the score at distance d is the sum of cos(d w_i); the gap is its least
    drop below d = 0. The number of pairs with the largest gap per pair suffers least from inputs that are not constant.
    """
    half = head_dim // 2
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    distances = torch.arange(1, FAR, dtype=torch.float64).unsqueeze(1)
    gaps = (1 - (distances * frequencies).cos()).cumsum(1).min(0).values
    best = int((gaps / torch.arange(1, half + 1)).argmax())
    return best + 1, float(gaps[best])
