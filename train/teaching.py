"""What a batch is taught: features for the heads and p for the objective, computed by the base or read from disk.

Knows: how both roads fit the positions of a `TargetPlan`. Refuses to know: heads, losses, and how files are kept.

Shapes: B batch, T position, F features, N supervised teacher positions, C of them, k tokens that are kept, Vd draft
vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.objective import LogitsTeacher, Taught, Teach, to_draft
from mtp.targets import TargetPlan
from train.feature_store import FeatureStore, Stored
from train.loader import Batch


@dataclass
class Lesson:
    """Features [B,T,F], and the teacher of the plan's positions."""

    features: Tensor
    teach: Teach


def from_base(
    base: FrozenBase, layers: tuple[int, ...], batch: Batch, plan: TargetPlan, draft_ids: Tensor | None
) -> Lesson:
    """Run the base. Right padding needs no mask: it is causal, and nothing supervised comes after padding."""
    output = base.forward(batch["tokens"], feature_layers=layers, segments=batch.get("segments"))
    flat = output.hidden.flatten(0, 1)
    return Lesson(output.features, LogitsTeacher(lambda rows: base.logits(flat[rows]), plan.teacher, draft_ids))


def from_store(store: FeatureStore, batch: Batch, draft_ids: Tensor | None, vocab_size: int) -> Lesson:
    """Put together what was kept of the batch's examples; `batch["examples"]` [B,n] names them, -1 is none."""
    tokens = batch["tokens"]
    rows = [[store.read(i) for i in row if i >= 0] for row in batch["examples"].tolist()]
    features = torch.zeros(*tokens.shape, rows[0][0].features.shape[1])
    for row, members in enumerate(rows):
        joined = torch.cat([member.features for member in members])
        features[row, : len(joined)] = joined.float()
    members = [member for row in rows for member in row]
    return Lesson(features.to(tokens.device), StoredTeacher(members, tokens.device, draft_ids, vocab_size))


class StoredTeacher:
    """p from the likeliest tokens that were kept, in the order of the plan: by row, then by position."""

    def __init__(self, members: list[Stored], device: torch.device, draft_ids: Tensor | None, vocab_size: int) -> None:
        self.p = torch.cat([member.p.float() for member in members]).to(device)
        tokens = torch.cat([member.tokens for member in members]).long().to(device)
        self.ids = to_draft(tokens, draft_ids, vocab_size)
        self.width = vocab_size if draft_ids is None else len(draft_ids)

    def __call__(self, rows: Tensor) -> Taught:
        ids, p = self.ids[rows], self.p[rows]
        known = torch.where(ids >= 0, p, 0.0)
        spread = torch.zeros(len(rows), self.width, device=p.device).scatter_add_(1, ids.clamp(min=0), known)
        return Taught(spread, ids[:, 0])
