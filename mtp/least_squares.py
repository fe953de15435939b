"""A closed-form start: recurrent heads that draft usefully before the first gradient step.

The base's final state at the next position is, to a good part, a linear function of what the heads read. With y_t the
state after the final norm at position t, e_t the embedding of token t, n() a norm without weight and h_t the features:

    y_{t+1} ~ y_t + M [n(e_{t+1}) ; n(y_t)],   rank(M) <= J E          (one step of the block)
    y_{t+1} ~ C h_t + M [n(e_{t+1}) ; n(y_t)]                          (the first step)

M and C are ridge regressions over a few thousand positions, M of reduced rank (Izenman 1975). The block computes them
exactly: every attention head starts looking at its own position, the values and `o_proj` are the factors of M, `fc` is
C, the MLP adds nothing, and the state g lives where the base's output matrix reads.

n() is of the type of the block's norms. Blocks that rotate nothing, or so little that some far position looks like the
own one, have no such start: `Moments` refuses them.

Knows: recurrent heads and second moments. Refuses to know: where states come from, and gradients.

Shapes: N positions, F features, D hidden, J key-value heads, G query heads per key-value head, E head size.
"""

import torch
from torch import Tensor, nn

from mtp.errors import UserError
from mtp.heads import RecurrentHeads
from mtp.heads.blocks import frequencies

RIDGE = 1e-4  # of the mean squared input; small because thousands of positions stand against it
ATTENTION_GAP = 64.0  # how much higher an own position scores than any other: nothing is left for the others
LEAST_GAP = 1e-3  # below, scores would have to be so large that float32 does not resolve them
FAR = 4096  # positions over which the gap is checked


class Moments:
    """Second moments of z = [h_t ; n(e_{t+1}) ; n(y_t)] with itself and with the states, summed over positions."""

    def __init__(self, heads: RecurrentHeads) -> None:
        own = frequencies(heads.attention.shape)
        if not len(own) or sharpest_pairs(own)[1] < LEAST_GAP:
            raise UserError(
                f"block.rope_frequencies has {len(own)} entries, too few or too regular for the closed-form start, "
                "which needs rotary positions to tell a position from all others; set model.start_positions: 0."
            )
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
        size, centred = self.heads.config.hidden_size, self.heads.attention.shape.norm == "layer"
        read = features.float()
        if self.heads.config.eagle31_norms:
            read = unit(read.view(len(read), -1, size), centred).flatten(1)
        embedded = unit(self.heads.embed(next_tokens).float(), centred)
        z = torch.cat([read, embedded, unit(states.float(), centred)], dim=-1)
        self.inputs += (z.T @ z).double().cpu()
        self.state += (z.T @ states.float()).double().cpu()
        self.next_state += (z.T @ next_states.float()).double().cpu()
        self.sums += z.sum(0).double().cpu()
        self.count += len(z)


def unit(x: Tensor, centred: bool = False) -> Tensor:
    """n(x): root mean square one along the last axis, after its mean is taken away if `centred`."""
    if centred:
        x = x - x.mean(-1, keepdim=True)
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
    for name, parameter in heads.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    for norm in (heads.embed_norm, heads.hidden_norm, heads.mlp_norm, *getattr(heads, "feature_norms", ())):
        nn.init.ones_(norm.weight)
    _set_last_norm(heads, torch.cat([fc, step]), moments)


def _set_last_norm(heads: RecurrentHeads, weights: Tensor, moments: Moments) -> None:
    """Give what the norm puts out the size of the states after the first step, which are weights [n,D] times z."""
    power = ((weights.T @ moments.inputs) * weights.T).sum() / (moments.count * heads.config.hidden_size)
    if isinstance(heads.norm, nn.LayerNorm):  # takes away each state's mean: put back the usual one
        mean = weights.mean(1)
        power = power - mean @ moments.inputs @ mean / moments.count
        nn.init.constant_(heads.norm.bias, float(mean @ moments.sums / moments.count))
    nn.init.constant_(heads.norm.weight, float(power.clamp(min=0).sqrt()))


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
    half = len(frequencies(block))
    pairs, gap = sharpest_pairs(frequencies(block))
    height = (ATTENTION_GAP / gap * block.head_dim**0.5) ** 0.5 / block.rope_scale
    for projection in (attention.q_proj, attention.k_proj):
        rows = projection.weight.view(-1, block.head_dim, projection.weight.shape[1])
        rows[:, :pairs] = height * one.to(rows)
        rows[:, half : half + pairs] = 0.0
    if block.qk_norm:  # brings the root mean square of a head to one, which is `height` at its `pairs` high entries
        for norm in (attention.q_norm, attention.k_norm):
            nn.init.constant_(norm.weight, height * (pairs / block.head_dim) ** 0.5)


def sharpest_pairs(frequencies: Tensor) -> tuple[int, float]:
    """How many of the fastest rotary pairs to use for attention to the own position, and the gap they give.

    With constant queries and keys of height one, the score at distance d is the sum of cos(d w_i); the gap is its least
    drop below d = 0. The number of pairs with the largest gap per pair suffers least from inputs that are not constant.
    """
    distances = torch.arange(1, FAR, dtype=torch.float64).unsqueeze(1)
    gaps = (1 - (distances * frequencies.double()).cos()).cumsum(1).min(0).values
    best = int((gaps / torch.arange(1, len(frequencies) + 1)).argmax())
    return best + 1, float(gaps[best])
