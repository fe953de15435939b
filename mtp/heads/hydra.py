"""`hydra`: K residual heads that read the tokens drafted before them, over the base's own output matrix.

Head k = 1…K at anchor t: u = [h_t ; e(x_{t+1}) ; … ; e(x_{t+k})]; z = P u + SiLU(W u + b), then n - 1 times
z <- z + SiLU(W' z + b'); logits = U z, predicting token t+k+1. P starts as the identity on h_t and the rest at zero, so
every head starts as the base's own prediction. Source: Ankner et al. 2024, arXiv 2402.05109.

Shapes: B batch, M anchors, K draft position, D hidden.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp.config import HeadsConfig
from mtp.heads.interface import Heads, Layout, State
from mtp.heads.medusa import ResidualHead
from mtp.layers import Linear
from mtp.targets import draft_inputs, take_anchors


class HydraHead(nn.Module):
    """Head k, which reads (k + 1) D."""

    def __init__(self, size: int, k: int, num_layers: int) -> None:
        super().__init__()
        self.shortcut = Linear((k + 1) * size, size, bias=False)
        self.first = Linear((k + 1) * size, size)
        self.rest = ResidualHead(size, num_layers - 1)
        nn.init.eye_(self.shortcut.weight)
        for parameter in self.first.parameters():
            nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.rest(self.shortcut(inputs) + nn.functional.silu(self.first(inputs)))
        return hidden


@dataclass
class HydraState(State):
    """The features [B,D] of the last verified anchor, and the tokens [B,k] after it: one verified, then drafts."""

    features: Tensor | None = None
    tokens: Tensor | None = None

    def select(self, rows: Tensor) -> "HydraState":
        features, tokens = (None if x is None else x[rows] for x in (self.features, self.tokens))
        return HydraState(len(rows), features, tokens)


class HydraHeads(Heads):
    """See the module. Reads one feature layer; trainable parameters: the sum over k of 2 (k + 1) D^2 + D, plus
    K (n - 1) (D^2 + D)."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            HydraHead(config.hidden_size, k, config.num_layers) for k in range(1, config.draft_length + 1)
        )

    def _head(self, k: int, features: Tensor, tokens: Tensor) -> Tensor:
        """z of head k [...,D] from features [...,D] and the tokens after them [..., k or more]."""
        hidden: Tensor = self.heads[k - 1](torch.cat([features, self.embed(tokens[..., :k]).flatten(-2)], dim=-1))
        return hidden

    def _unroll(self, features: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        picked = take_anchors(features, layout.anchors)
        inputs = take_anchors(draft_inputs(tokens, self.config.draft_length), layout.anchors)
        return torch.stack([self._head(k, picked, inputs) for k in range(1, self.config.draft_length + 1)], dim=2)

    def new_state(self, batch_size: int) -> HydraState:
        return HydraState(batch_size)

    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        assert isinstance(state, HydraState)
        if features.shape[1]:
            state.features, state.tokens = features[:, -1].to(self.precision), next_tokens[:, -1:]

    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        assert isinstance(state, HydraState)
        assert state.features is not None, "ingest() at least one anchor before drafting"
        assert state.tokens is not None
        if k > 1:
            state.tokens = torch.cat([state.tokens[:, : k - 1], previous.unsqueeze(1)], dim=1)
        return self.project(self._head(k, state.features, state.tokens))
