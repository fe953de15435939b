"""`medusa`: K independent residual heads on one hidden state, over the base's own output matrix.

Head k = 1…K: z = h_t; n times z <- z + SiLU(W z + b); logits = U z, predicting token t+k+1. W and b start at zero, so
every head starts as the base's own prediction. Source: Cai et al. 2024, arXiv 2401.10774, section 2.1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtp.config import HeadsConfig
from mtp.heads.interface import Heads, Layout, State
from mtp.layers import Linear
from mtp.targets import take_anchors


class ResidualHead(nn.Module):
    """n residual layers, each a module of its own."""

    def __init__(self, size: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Linear(size, size) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


@dataclass
class MedusaState(State):
    """The features [B,F] of the last verified anchor; None before the first."""

    features: Tensor | None = None

    def select(self, rows: Tensor) -> "MedusaState":
        return MedusaState(len(rows), None if self.features is None else self.features[rows])


class MedusaHeads(Heads):
    """See the module. Reads one feature layer; trainable parameters: K * n * (D^2 + D)."""

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.heads = nn.ModuleList(
            ResidualHead(config.hidden_size, config.num_layers) for _ in range(config.draft_length)
        )

    def _unroll(self, features: Tensor, tokens: Tensor, layout: Layout) -> Tensor:
        picked = take_anchors(features, layout.anchors)
        return torch.stack([head(picked) for head in self.heads], dim=2)

    def new_state(self, batch_size: int) -> MedusaState:
        return MedusaState(batch_size)

    def ingest(self, state: State, features: Tensor, next_tokens: Tensor) -> None:
        assert isinstance(state, MedusaState)
        if features.shape[1]:
            state.features = features[:, -1].to(self.precision)

    def draft(self, state: State, k: int, previous: Tensor) -> Tensor:
        assert isinstance(state, MedusaState)
        assert state.features is not None, "ingest() at least one anchor before drafting"
        return self.project(self.heads[k - 1](state.features), k)
