"""Checks on the first batch, before hours go into training: seconds that find a misplaced norm, shift or mask.

Knows: what must hold for any base and any heads at any moment of training. Refuses to know: how batches are made, and
what training does afterwards. That the mask covers the answers' text is asserted where it is made (`train.chat`).

Shapes: B batch, T position, K draft position, N supervised teacher positions.
"""

import torch
from torch import Tensor

from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.heads import Heads
from mtp.losses import LossOptions
from mtp.objective import draft_sums, to_draft
from mtp.targets import pad_for_drafts, plan_targets
from train.loader import Batch
from train.teaching import from_base

ROWS, LENGTH = 2, 192  # of the batch; enough for every statement, and quick
MARGIN = 0.5  # in ln p: a base that knows nothing of the text tells no place from another


def small(batch: Batch) -> Batch:
    """A corner of the batch: at most 2 rows of 192 tokens that hold something supervised."""
    order = batch["supervised"].sum(1).argsort(descending=True)[:ROWS]
    first = int(batch["supervised"][order].any(0).nonzero()[0, 0])
    start = max(0, min(first - LENGTH // 4, batch["tokens"].shape[1] - LENGTH))
    names = ("tokens", "supervised", "segments", "attention_mask")
    return {name: batch[name][order, start : start + LENGTH] for name in names if name in batch}


def run_self_tests(base: FrozenBase, heads: Heads, batch: Batch) -> list[str]:
    """One line per check that passed; UserError for the first that failed."""
    corner = {name: tensor.to(base.device) for name, tensor in small(batch).items()}
    return [check_head(base, corner), check_alignment(base, corner), check_gradients(base, heads, corner)]


@torch.no_grad()
def check_head(base: FrozenBase, batch: Batch) -> str:
    """The argmax from the state that heads project must be that of the model itself: a missing norm shows here."""
    tokens = batch["tokens"][:1]
    if "segments" in batch:  # a packed row means something else to the model itself
        tokens = tokens[:, batch["segments"][0] == batch["segments"][0, 0]]
    ours = base.logits(base.forward(tokens, feature_layers=(base.num_layers,)).hidden)
    own = base.model(input_ids=tokens, use_cache=False).logits
    agree = float((ours.argmax(-1) == own.argmax(-1)).float().mean())
    if agree < 0.99:  # a near tie may fall either way
        raise UserError(
            f"self-test: logits from the base's last state have the model's argmax at {agree:.0%} of positions only; "
            "this base has an output road that mtp does not know (a norm or a scale), so heads would learn nonsense. "
            "Use another base."
        )
    return f"the base's states give its own argmax at {agree:.1%} of positions"


@torch.no_grad()
def check_alignment(base: FrozenBase, batch: Batch) -> str:
    """The data's tokens must not be likelier under p one place off than where they are: a shifted target shows."""
    tokens = batch["tokens"]
    output = base.forward(tokens, feature_layers=(base.num_layers,), segments=batch.get("segments"))
    log_p = base.logits(output.hidden).float().log_softmax(-1)
    right, early, late = (_mean_log(log_p, tokens, batch["supervised"], shift) for shift in (1, 0, 2))
    if right < max(early, late) - MARGIN:
        raise UserError(
            f"self-test: the base gives the data's tokens ln p = {right:.2f} at their place, {early:.2f} one place "
            f"before and {late:.2f} one after, so targets are out of step or the data are no text for this base; check "
            "data.train with mtp-train inspect."
        )
    return f"targets sit right: ln p {right:.2f} there, {early:.2f} and {late:.2f} one place off"


def _mean_log(log_p: Tensor, tokens: Tensor, supervised: Tensor, shift: int) -> float:
    """Mean ln p(token t) read at position t - shift, over supervised t."""
    row, position = supervised.nonzero(as_tuple=True)
    keep = position >= shift
    row, position = row[keep], position[keep]
    return float(log_p[row, position - shift, tokens[row, position]].mean())


def check_gradients(base: FrozenBase, heads: Heads, batch: Batch) -> str:
    """The loss of each draft position must move some parameter: heads that are built but never trained show here."""
    length = heads.config.draft_length
    plan = plan_targets(batch["tokens"], batch["supervised"], length, batch.get("segments"))
    lesson = from_base(base, heads.config.feature_layers, batch, plan, heads.draft_ids)
    targets = to_draft(plan.tokens, heads.draft_ids, base.vocab_size)
    padded = pad_for_drafts(batch["tokens"], length)
    norms = []
    for k in range(length):
        only = torch.zeros(length, device=base.device)
        only[k] = 1.0
        hidden = heads.unroll(lesson.features, padded, plan.anchors, segments=batch.get("segments"))
        picked = hidden * only[:, None] + hidden.detach() * (1 - only)[:, None]
        total = draft_sums(picked, plan, heads.project, lesson.teach, targets, LossOptions()).total
        slopes = torch.autograd.grad(total, list(heads.parameters()), allow_unused=True)
        norms.append(float(sum(slope.double().square().sum() for slope in slopes if slope is not None) ** 0.5))
    dead = [str(k) for k, norm in enumerate(norms, 1) if not 0 < norm < float("inf")]
    if dead:
        raise UserError(
            f"self-test: the loss of draft position {', '.join(dead)} of {length} gives no finite gradient; answers "
            "shorter than draft_length + 1 tokens leave later positions untaught: lower heads.draft_length or use "
            "longer answers."
        )
    return f"all {length} draft positions receive gradient"
