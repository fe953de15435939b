"""Losses: formulas against the plain definition, gradients, and invariance to chunks, padding and batching."""

import pytest
import torch
from torch import Tensor

from mtp.errors import UserError
from mtp.losses import (
    LossOptions,
    LossWeights,
    acceptance,
    cross_entropy,
    gradient,
    kl_to_base,
    lk_share,
    losses,
    position_weights,
)
from mtp.metrics import implied_accept_len
from mtp.objective import DraftSums, LogitsTeacher, draft_sums, to_draft
from mtp.targets import pad_for_drafts, plan_targets
from tests.mtp.heads_toys import D, K, V, toy_heads

VOCABULARY = torch.arange(0, V, 2)


def batch(rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, supervision and final states of a made-up base."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, V, (rows, length), generator=generator)
    supervised = torch.rand(rows, length, generator=generator) < 0.7
    return tokens, supervised, torch.randn(rows, length, 3 * D, generator=generator).double()


RUNNING = torch.linspace(0.1, 0.9, K)  # a running acceptance that `lk` goes by
OUTPUT = torch.randn(V, D, generator=torch.Generator().manual_seed(4)).double()


def sums(tokens: Tensor, supervised: Tensor, features: Tensor, options: LossOptions, heads: object) -> DraftSums:
    plan = plan_targets(tokens, supervised, K)
    hidden = heads.unroll(features, pad_for_drafts(tokens, K), plan.anchors)  # type: ignore[attr-defined]
    states = features[..., :D].flatten(0, 1)
    teacher = LogitsTeacher(lambda rows: states[rows] @ OUTPUT.T, plan.teacher, heads.draft_ids)  # type: ignore[attr-defined]
    targets = to_draft(plan.tokens, heads.draft_ids, V)  # type: ignore[attr-defined]
    return draft_sums(hidden, plan, heads.project, teacher, targets, options, None, RUNNING)  # type: ignore[attr-defined]


def slow_total(tokens: Tensor, supervised: Tensor, features: Tensor, options: LossOptions, heads: object) -> Tensor:
    """The objective by the definition, one position at a time, from the whole logits."""
    logits = heads(features, pad_for_drafts(tokens, K))  # type: ignore[operator]
    weights = position_weights(K, options.decay)
    ids = VOCABULARY if heads.draft_ids is not None else torch.arange(V)  # type: ignore[attr-defined]
    total = torch.zeros((), dtype=torch.float64)
    for b in range(len(tokens)):
        for t in range(tokens.shape[1] - 2):
            for k in range(1, K + 1):
                target = t + k + 1
                if not (supervised[b, t + 2] and target < tokens.shape[1] and supervised[b, target]):
                    continue
                p = (features[b, t + k, :D] @ OUTPUT.T).softmax(-1)[ids]
                log_q = logits[b, t, k - 1].log_softmax(-1)
                share = float(torch.exp(-3 * RUNNING[k - 1]))
                kl, tv = options.kl + options.lk * share, options.tv + options.lk * (1 - share)
                total = total + weights[k - 1] * kl * (p * ((p / p.sum()).log() - log_q)).sum()
                total = total + weights[k - 1] * tv * (1 - torch.minimum(p, log_q.exp()).sum())
                where = (ids == tokens[b, target]).nonzero()
                if len(where):
                    total = total - weights[k - 1] * options.ce * log_q[where[0, 0]]
    return total


@pytest.mark.parametrize("kind", ["recurrent"])
@pytest.mark.parametrize("vocabulary", [None, VOCABULARY])
@pytest.mark.parametrize(
    "weights",
    [{"kl": 0.7, "ce": 0.3}, {"kl": 0.0, "tv": 1.0}, {"kl": 0.0, "lk": 1.0}, {"kl": 0.1, "tv": 0.5, "lk": 2.0}],
)
@pytest.mark.parametrize("chunk", [4, 1000])
def test_chunked_objective_and_gradient_equal_the_definition(
    kind: str, vocabulary: Tensor | None, weights: dict[str, float], chunk: int
) -> None:
    options = LossOptions(**weights, decay=0.8, chunk=chunk)  # type: ignore[arg-type]
    data = batch()
    heads = toy_heads(kind, vocabulary)
    fast = sums(*data, options, heads).total
    fast.backward()
    gradients = [p.grad.clone() for p in heads.parameters() if p.grad is not None]
    heads.zero_grad()
    slow = slow_total(*data, options, heads)
    slow.backward()
    assert float(fast) == pytest.approx(float(slow), rel=1e-5)
    for fast_grad, parameter in zip(gradients, heads.parameters(), strict=True):
        assert parameter.grad is not None
        assert (fast_grad - parameter.grad).abs().max() < 1e-4 * max(1.0, float(parameter.grad.abs().max()))


def test_sums_do_not_depend_on_padding_or_batching() -> None:
    tokens, supervised, features = batch()
    options, heads = LossOptions(chunk=7), toy_heads("recurrent", VOCABULARY)
    whole = sums(tokens, supervised, features, options, heads).detached()
    rows = [sums(*(x[i : i + 1] for x in (tokens, supervised, features)), options, heads).detached() for i in range(3)]
    apart = rows[0] + rows[1] + rows[2]
    padded = sums(
        *(torch.nn.functional.pad(x, (0, 5)) for x in (tokens, supervised)),
        torch.nn.functional.pad(features, (0, 0, 0, 5), value=9.0),
        options,
        heads,
    ).detached()
    for name in vars(whole):
        for other in (apart, padded):
            assert torch.allclose(getattr(whole, name), getattr(other, name), rtol=1e-5), name


def test_targets_shifted_by_one_do_worse() -> None:
    """The negative control of the alignment: heads trained on right targets lose when every target moves by one."""
    tokens = (torch.arange(40) % 7).repeat(4, 1)
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    features = torch.nn.functional.one_hot(tokens, 3 * D).double()
    heads, options = toy_heads("recurrent"), LossOptions(kl=0.0, ce=1.0)
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        result = sums(tokens, supervised, features, options, heads)
        (result.total / result.positions).backward()
        optimizer.step()
    learned = sums(tokens, supervised, features, options, heads)
    shifted = sums(tokens.roll(1, 1), supervised, features, options, heads)
    assert float(learned.total / learned.positions) < 0.05  # a periodic sequence is learned
    assert float(shifted.total / shifted.positions) > 1.0


def test_losses_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    assert float(acceptance(p, q)) == pytest.approx(0.75)
    assert float(kl_to_base(p[None], q.log()[None, None])) == pytest.approx(0.25 * 0.6931472, rel=1e-5)
    assert float(kl_to_base(p[None], p.log()[None, None])) == pytest.approx(0.0, abs=1e-7)
    assert cross_entropy(q.log().expand(2, 3), torch.tensor([1, -1])).tolist() == pytest.approx([0.6931472, 0.0])


def test_mass_outside_the_draft_vocabulary_counts_as_rejected() -> None:
    p = torch.tensor([0.3, 0.3])  # the base has 0.4 elsewhere
    assert float(acceptance(p, torch.tensor([0.5, 0.5]))) == pytest.approx(0.6)
    assert float(kl_to_base(p[None], torch.tensor([0.5, 0.5]).log()[None, None])) == pytest.approx(0.0, abs=1e-7)


def test_position_weights_sum_to_one() -> None:
    assert position_weights(3, 0.5).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_implied_acceptance_length() -> None:
    assert implied_accept_len([]) == 1.0
    assert implied_accept_len([1.0, 1.0, 1.0]) == 4.0
    assert implied_accept_len([0.5, 0.5]) == pytest.approx(1.75)


@pytest.mark.parametrize(
    "bad",
    [
        {"lk": float("nan")},
        {"kl": -1.0},
        {"kl": 0.0},
        {"decay": 0.0},
        {"decay": 1.5},
        {"chunk": 0},
        {"blend": (0.6, 0.2)},
    ],
)
def test_bad_options_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(UserError, match="loss."):
        LossOptions(**bad)  # type: ignore[arg-type]


def test_nothing_supervised_is_zero_and_has_a_gradient() -> None:
    tokens, supervised, features = batch()
    result = sums(tokens, torch.zeros_like(supervised), features, LossOptions(), toy_heads("recurrent"))
    assert float(result.total) == 0.0
    result.total.backward()


@pytest.mark.parametrize("name", ["kl", "ce", "tv", "lk"])
def test_gradients_in_closed_form_are_those_of_the_values(name: str) -> None:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(5, K, 9, generator=generator).double().requires_grad_()
    p = 0.8 * torch.randn(5, 9, generator=generator).double().softmax(-1)  # a fifth lies outside the draft vocabulary
    targets, scale = torch.tensor([0, 3, -1, 8, 3]), torch.rand(5, K, generator=generator).double()
    weights = LossWeights(**{name: 1.5})
    found = losses(logits, p, targets, weights, RUNNING.double())
    (found.loss * scale).sum().backward()
    with torch.no_grad():
        closed = gradient(found.q.detach().clone(), p, targets, weights, RUNNING.double(), scale)
    assert logits.grad is not None
    assert torch.allclose(closed, logits.grad, atol=1e-12)
    wrong = gradient(found.q.detach().clone(), p.roll(1, -1), targets.roll(1), weights, RUNNING.double(), scale)
    assert not torch.allclose(wrong, logits.grad, atol=1e-4)  # the comparison can tell


def test_the_hybrid_goes_from_kl_to_the_rejection_rate() -> None:
    assert lk_share(torch.tensor([0.0, 1.0])).tolist() == pytest.approx([1.0, 0.0497871])


def test_weights_go_over_to_the_final_ones_between_two_shares_of_training() -> None:
    options = LossOptions(kl=1.0, final=LossWeights(tv=2.0), blend=(0.2, 0.6))
    at = [options.at(progress) for progress in (0.0, 0.2, 0.4, 0.6, 1.0)]
    assert [w.kl for w in at] == pytest.approx([1.0, 1.0, 0.5, 0.0, 0.0])
    assert [w.tv for w in at] == pytest.approx([0.0, 0.0, 1.0, 2.0, 2.0])
    assert LossOptions(final=LossWeights(ce=1.0)).at(0.5) == LossWeights(ce=1.0)  # a step where both shares are equal
