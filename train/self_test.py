"""Checks on the first batches, before hours go into training: seconds that find a misplaced norm, shift or gradient.

Knows: what must hold for any base and any heads at any moment of training. Refuses to know: how batches are made, and
what training does afterwards. That the mask covers the answers' text is asserted where it is made (`train.chat`).

Shapes: B batch, T position, K draft position, N supervised teacher positions, V vocabulary.
"""

import math
from collections.abc import Callable, Iterable
from itertools import islice

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

BATCHES = 16  # that are looked through for long answers
ROWS, LENGTH = 2, 192  # of the one that is taken; enough for every statement, and quick
MARGIN = 0.5  # in ln p, by which a place must be likelier than the right one
KNOWN = 0.5  # of -ln V, the ln p of guessing: a base that knows nothing of the text tells no place from another
OWN = 0.5  # in ln p, by which a text may be less likely than what the base itself would write


def run_self_tests(
    base: FrozenBase, heads: Heads, batches: Iterable[Batch], tell: Callable[[int, int], None] | None = None
) -> list[str]:
    """One line per check that passed; UserError for the first that failed. `tell(done, of)` counts the checks."""
    chosen = max(islice(batches, BATCHES), key=lambda batch: int(batch["supervised"].sum(1).max()))
    corner = {name: tensor.to(base.device) for name, tensor in small(chosen).items()}
    checks: list[Callable[[], list[str]]] = [
        lambda: [check_head(base, corner)],
        lambda: check_alignment(base, heads, corner),
        lambda: [check_decoding(base, heads, corner)],
        lambda: [check_gradients(base, heads, corner)],
    ]
    lines: list[str] = []
    for done, check in enumerate(checks, start=1):
        lines += check()
        if tell is not None:
            tell(done, len(checks))
    return lines


def small(batch: Batch) -> Batch:
    """A corner of the batch: at most 2 rows of 192 tokens, from a little before their first supervised one."""
    order = batch["supervised"].sum(1).argsort(descending=True)[:ROWS]
    first = int(batch["supervised"][order].any(0).nonzero()[0, 0])
    start = max(0, min(first - LENGTH // 4, batch["tokens"].shape[1] - LENGTH))
    names = ("tokens", "supervised", "segments")
    return {name: batch[name][order, start : start + LENGTH] for name in names if name in batch}


def one_text(batch: Batch) -> Tensor:
    """Tokens [1,T] of the first row, or of the first text in it."""
    if "segments" not in batch:
        return batch["tokens"][:1]
    segments = batch["segments"][0]
    return batch["tokens"][:1, segments == segments[0]]


@torch.no_grad()
def check_head(base: FrozenBase, batch: Batch) -> str:
    """p from the state that heads project must be that of the model itself: a missing norm shows here."""
    tokens = one_text(batch)
    ours = base.logits(base.forward(tokens, feature_layers=(base.num_layers,)).features).float()
    own = base.model(input_ids=tokens, use_cache=False).logits.float()
    agree = float((ours.argmax(-1) == own.argmax(-1)).float().mean())
    off = float((ours.softmax(-1) - own.softmax(-1)).abs().sum(-1).mean()) / 2
    if agree < 0.9 or not off < 0.05:  # a near tie may fall either way
        raise UserError(
            f"self-test: p from the base's last state is off by a total variation of {off:.2f} and has the model's "
            f"argmax at {agree:.0%} of positions; this base has an output road that mtp does not know (a norm or a "
            "scale), so heads would learn nonsense. Use another base."
        )
    return f"the base's states give its own argmax at {agree:.1%} of positions"


@torch.no_grad()
def check_alignment(base: FrozenBase, heads: Heads, batch: Batch) -> list[str]:
    """The targets must not be likelier under p one place off than at their teachers: a shifted target shows. And a
    word on whether the text is such as the base would write, which is what heads are going to draft."""
    tokens, segments = batch["tokens"], batch.get("segments")
    plan = plan_targets(tokens, batch["supervised"], heads.config.draft_length, segments)
    if not len(plan.teacher):
        raise UserError(
            "self-test: data.train has no supervised token with two tokens before it in its first batches, so nothing "
            "can be drafted; give each answer a prompt."
        )
    log_p = base.logits(base.forward(tokens, segments=segments).hidden).float().log_softmax(-1).flatten(0, 1)
    here, later, earlier = (
        float(log_p[(plan.teacher + shift).clamp(0, len(log_p) - 1), plan.tokens].mean()) for shift in (0, 1, -1)
    )
    known = max(later, earlier) > -KNOWN * math.log(base.vocab_size)
    if known and here < max(later, earlier) - MARGIN:
        raise UserError(
            f"self-test: the base gives the targets ln p = {here:.2f} at their teachers, {later:.2f} one place later "
            f"and {earlier:.2f} one place earlier, so targets are out of step or the data are no text for this base; "
            "check data.train with mtp-train inspect."
        )
    own = float((log_p[plan.teacher].exp() * log_p[plan.teacher]).sum(-1).mean())
    lines = [f"targets sit right: ln p {here:.2f} there, {later:.2f} and {earlier:.2f} one place off"]
    if here < own - OWN:
        lines.append(
            f"warning: ln p of the targets is {here:.2f}, and of what the base would write {own:.2f}; heads draft "
            "for the base, so they learn more from its own answers: mtp-train regenerate"
        )
    return lines


@torch.no_grad()
def check_decoding(base: FrozenBase, heads: Heads, batch: Batch) -> str:
    """Decoding's road must give the logits of training's: a state that saw its own target shows, or a feature layer or
    token one place off."""
    tokens, length = one_text(batch), heads.config.draft_length
    anchor = max(0, tokens.shape[1] - 1 - length)
    padded = pad_for_drafts(tokens, length)
    features = base.forward(tokens, feature_layers=heads.config.feature_layers).features
    at = torch.tensor([[anchor]], device=tokens.device)
    trained = heads.project(heads.unroll(features, padded, at)[0, 0])
    cache, state = base.new_cache(), heads.new_state(1)
    seen = base.forward(tokens[:, : anchor + 1], cache=cache, feature_layers=heads.config.feature_layers).features
    heads.ingest(state, seen, padded[:, 1 : anchor + 2])
    drafted = torch.cat([heads.draft(state, k, padded[:, anchor + k]) for k in range(1, length + 1)])
    off = float((trained.softmax(-1) - drafted.softmax(-1)).abs().sum(-1).max()) / 2
    if not off < (0.02 if base.dtype.itemsize >= 4 else 0.2):
        raise UserError(
            f"self-test: q of decoding differs from q of training by a total variation of {off:.2g} on the same text; "
            "heads would be served something else than they learned. Use another heads.kind or base, and report this."
        )
    return f"decoding drafts by the q that is trained, to {off:.1g}"


def check_gradients(base: FrozenBase, heads: Heads, batch: Batch) -> str:
    """The loss of each draft position must move parameters, and every parameter must be moved by some: heads that are
    built but never trained show here."""
    length = heads.config.draft_length
    plan = plan_targets(batch["tokens"], batch["supervised"], length, batch.get("segments"))
    lesson = from_base(base, heads.config.feature_layers, batch, plan, heads.draft_ids)
    targets = to_draft(plan.tokens, heads.draft_ids, base.vocab_size)
    hidden = heads.unroll(
        lesson.features, pad_for_drafts(batch["tokens"], length), plan.anchors, segments=batch.get("segments")
    )
    named = {name: parameter for name, parameter in heads.named_parameters() if parameter.requires_grad}
    dead: list[str] = []
    reached: set[str] = set()
    for k in range(length):
        only = torch.zeros(length, device=base.device).index_fill_(0, torch.tensor(k, device=base.device), 1.0)
        picked = hidden * only[:, None] + hidden.detach() * (1 - only)[:, None]
        total = draft_sums(picked, plan, heads.project, lesson.teach, targets, LossOptions()).total
        slopes = _slopes(total, named)
        reached |= slopes.keys()
        norm = float(sum(slope.double().square().sum() for slope in slopes.values()) ** 0.5)
        if not 0 < norm < float("inf"):
            dead.append(str(k + 1))
    if dead:
        raise UserError(
            f"self-test: the loss of draft position {', '.join(dead)} of {length} gives no finite gradient; answers "
            "shorter than draft_length + 1 tokens leave later positions untaught: lower heads.draft_length or use "
            "longer answers."
        )
    idle = [name for name, _ in heads.named_parameters() if name not in reached]
    if idle:
        shown = ", ".join(idle[:3]) + (", …" if len(idle) > 3 else "")
        raise UserError(
            f"self-test: no loss reaches {len(idle)} parameters of the heads ({shown}), which would never be trained; "
            f"report this, and use another heads.kind than {heads.config.kind}."
        )
    return f"all {length} draft positions and all parameters receive gradient"


def _slopes(total: Tensor, named: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Gradients of the parameters that the total depends on."""
    if not total.requires_grad:
        return {}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True)
    return {name: slope for name, slope in zip(named, found, strict=True) if slope is not None}
