"""The acceptance rules over whole blocks, by walking every outcome: what they keep, and the law of the text."""

import math
from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from decode.walk import walk
from mtp.sampling import RandomSource
from mtp.verify import EXACT_RULES, RULES, verify
from tests.decode.toys import table, total_variation, true_law

EXACT = 1e-12
CONTEXT = [1, 2]
P, Q = table(0).softmax(dim=-1), table(1).softmax(dim=-1)
TOY_P = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
TOY_Q = TOY_P.flip(0)


def rows(probs: Tensor, tokens: tuple[int, ...], count: int) -> Tensor:
    """[1, count, V]: the laws after CONTEXT and each beginning of `tokens`."""
    text = [*CONTEXT, *tokens]
    contexts = torch.tensor(text[: count + 1])
    return probs[contexts[:-1], contexts[1:]][None]


def texts(rule: str, drafts: int, p: Tensor, q: Tensor, counting: int | None = None) -> dict[tuple[int, ...], float]:
    """The law of drafts that stay and the token after them, over all drafts from q. `counting`: how many count."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    lengths = torch.tensor([drafts if counting is None else counting])
    for tokens in product(range(p.shape[-1]), repeat=drafts):
        q_rows, p_rows = rows(q, tokens, drafts), rows(p, tokens, drafts + 1)
        chance = math.prod(float(q_rows[0, k, token]) for k, token in enumerate(tokens))

        def run(random: RandomSource, tokens: Any = tokens, q: Tensor = q_rows, p: Tensor = p_rows) -> tuple[int, ...]:
            verdict = verify(rule, torch.tensor([tokens]), q, p, random, lengths)
            return (*tokens[: int(verdict.num_accepted)], int(verdict.next_token))

        for text, conditional in walk(run).items():
            law[text] += chance * conditional
    return law


def law_error(rule: str, drafts: int, counting: int | None = None, p: Tensor = P, q: Tensor = Q) -> float:
    """Total variation from p, once every text goes on as p does to the length of the longest."""
    length = (drafts if counting is None else counting) + 1
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for text, chance in texts(rule, drafts, p, q, counting).items():
        for rest, conditional in true_law(p, [*CONTEXT, *text], length - len(text)).items():
            law[text + rest] += chance * conditional
    return total_variation(law, true_law(p, CONTEXT, length))


def mean_kept(rule: str, drafts: int, p: Tensor, q: Tensor) -> float:
    return sum(chance * (len(text) - 1) for text, chance in texts(rule, drafts, p, q).items())


@pytest.mark.parametrize("rule", ["block", "token", "match"])
@pytest.mark.parametrize(("drafts", "counting"), [(0, 0), (1, 1), (2, 2), (2, 1), (2, 0), (3, 2)])
def test_one_verification_keeps_the_law(rule: str, drafts: int, counting: int) -> None:
    """Drafts that do not count, though q has rows for them, included."""
    if rule == "match" and drafts > 1:
        p, q = table(4, 2).softmax(dim=-1), table(5, 2).softmax(dim=-1)
        assert law_error(rule, drafts, counting, p[[0, 1, 1]][:, [0, 1, 1]], q[[0, 1, 1]][:, [0, 1, 1]]) < EXACT
    else:
        assert law_error(rule, drafts, counting) < EXACT


def test_the_lossy_rule_says_so_and_is() -> None:
    assert [rule for rule in RULES if rule not in EXACT_RULES] == ["lossy-typical"]
    assert law_error("lossy-typical", 1) > 0.05
    assert law_error("lossy-typical", 2) > 0.05


def test_the_block_rule_keeps_more_of_the_toy() -> None:
    """10/9 and 11/9 of two drafts. Sun et al. 2024 (arXiv 2403.10444), section 3."""
    p, q = TOY_P.expand(3, 3, 2), TOY_Q.expand(3, 3, 2)  # a context may hold the 2 of CONTEXT
    assert mean_kept("token", 2, p, q) == pytest.approx(10 / 9, abs=EXACT)
    assert mean_kept("block", 2, p, q) == pytest.approx(11 / 9, abs=EXACT)
    assert mean_kept("token", 1, p, q) == pytest.approx(2 / 3, abs=EXACT)
    assert mean_kept("block", 1, p, q) == pytest.approx(2 / 3, abs=EXACT)


class Asked(RandomSource):
    """Notes the chances that a rule asks for."""

    chances: Tensor

    def bernoulli(self, prob: Tensor) -> Tensor:
        self.chances = prob
        return super().bernoulli(prob)


def test_the_block_rule_never_keeps_fewer() -> None:
    """200 random toys. Every combination of tokens is a row of one batch; the chance that a row keeps n drafts follows
    from its thresholds, which are the chances the rule asks for."""
    gains = []
    for seed in range(200):
        drafts, vocab = 1 + seed % 4, 2 + seed % 3
        p, q = (table(seed + shift, vocab, 1.5).softmax(dim=-1) for shift in (0, 1_000))
        tokens = torch.tensor(list(product(range(vocab), repeat=drafts)))
        contexts = torch.cat([torch.tensor([[0, 1]]).expand(len(tokens), 2), tokens], dim=1)
        p_rows = torch.stack([p[contexts[:, k], contexts[:, k + 1]] for k in range(drafts + 1)], dim=1)
        q_rows = torch.stack([q[contexts[:, k], contexts[:, k + 1]] for k in range(drafts)], dim=1)
        chance = q_rows.gather(2, tokens[..., None])[..., 0].prod(dim=1)
        kept = {}
        for rule in ("token", "block"):
            asked = Asked()
            verify(rule, tokens, q_rows, p_rows, asked)
            # n or more stay by the token rule if the first n pass, by the block rule if the n-th or a later one does.
            first = asked.chances.cumprod(dim=1)
            later = 1 - (1 - asked.chances).flip(1).cumprod(dim=1).flip(1)
            kept[rule] = float((chance * (first if rule == "token" else later).sum(dim=1)).sum())
        if drafts == 1:
            assert kept["block"] == pytest.approx(kept["token"], abs=EXACT)
        gains.append(kept["block"] - kept["token"])
    assert min(gains) > -EXACT
    assert max(gains) > 0.1


def test_match_keeps_a_draft_with_the_chance_of_agreement() -> None:
    p, q = P[1, 2], Q[1, 2]
    kept = sum(chance for text, chance in texts("match", 1, P, Q).items() if len(text) == 2)
    assert kept == pytest.approx(float((p * q).sum()), abs=EXACT)
    certain = torch.nn.functional.one_hot(Q.argmax(dim=-1), 3).double()
    kept = sum(chance for text, chance in texts("match", 1, P, certain).items() if len(text) == 2)
    assert kept == pytest.approx(float(p[q.argmax()]), abs=EXACT)


def test_the_lossy_rule_follows_its_formula() -> None:
    """Two laws over four tokens: entropy 2 log 2 gives the bar 0.3 / 4 = 0.075, entropy 0 the bar 0.09."""
    uniform, sure = torch.full((4,), 0.25).double(), torch.tensor([1.0, 0, 0, 0]).double()
    p = torch.stack([uniform, sure, uniform])[None]
    q = torch.full((1, 2, 4), 0.25).double()
    for tokens, kept in (([3, 0], 2), ([3, 1], 1), ([0, 0], 2)):
        verdict = verify("lossy-typical", torch.tensor([tokens]), q, p, RandomSource(0))
        assert int(verdict.num_accepted) == kept
    # Entropy 0.394 of (0.9, 0.08, 0.02): min(0.09, 0.3 exp(-0.394) = 0.202) = 0.09 is the bar, which 0.08 misses.
    # Entropy 1.386 of 0.08 and 12 others: 0.3 exp(-H) is below 0.09 and decides.
    few = torch.tensor([0.9, 0.08, 0.02]).double().expand(1, 2, 3)
    for token, kept in ((0, 1), (1, 0), (2, 0)):
        verdict = verify("lossy-typical", torch.tensor([[token]]), few[:, :1], few, RandomSource(0))
        assert int(verdict.num_accepted) == kept
    many = torch.tensor([0.08, 0.02] + [0.09] * 10).double().expand(1, 2, 12)  # H = 2.45, bar 0.026
    for token, kept in ((0, 1), (1, 0), (2, 1)):
        verdict = verify("lossy-typical", torch.tensor([[token]]), many[:, :1], many, RandomSource(0))
        assert int(verdict.num_accepted) == kept


# ---- ragged rows -------------------------------------------------------------------------------------------------


class Row(RandomSource):
    """The same uniforms for each row of a batch, in the order of the drafts; then 0.3 for the token."""

    def uniform(self, shape: Any) -> Tensor:
        if shape[-1] == 1:
            return torch.full(tuple(shape), 0.3, dtype=torch.float64)
        return torch.tensor([0.35, 0.7, 0.2, 0.55], dtype=torch.float64)[: shape[-1]].expand(tuple(shape))

    def bernoulli(self, prob: Tensor) -> Tensor:
        return self.uniform((*prob.shape, 2))[..., 0] < prob if prob.shape[-1] == 1 else super().bernoulli(prob)


@pytest.mark.parametrize("rule", ["block", "token", "match", "lossy-typical"])
@pytest.mark.parametrize("spoil", [None, torch.nan, torch.inf, 0.0])
def test_rows_of_a_ragged_batch_are_judged_alone(rule: str, spoil: float | None) -> None:
    """With any draws, and whatever stands beyond the length of a row."""
    drafts, vocab, batch = 3, 4, 60
    p = torch.stack([table(seed, vocab).softmax(dim=-1)[0, : drafts + 1] for seed in range(batch)])
    q = torch.stack([table(seed + 500, vocab).softmax(dim=-1)[1, :drafts] for seed in range(batch)])
    tokens = RandomSource(3).categorical(q)
    lengths = torch.arange(batch) % (drafts + 1)
    if spoil is not None:
        for row, length in enumerate(lengths.tolist()):
            q[row, length:] = spoil
            p[row, length + 1 :] = spoil
    together = verify(rule, tokens, q, p, Row(), lengths)
    assert 0 < int(together.num_accepted.sum()) < int(lengths.sum())
    assert not together.residual_empty.any()
    for row, length in enumerate(lengths.tolist()):
        one = slice(row, row + 1)
        alone = verify(rule, tokens[one, :length], q[one, :length], p[one, : length + 1], Row())
        assert int(alone.num_accepted) == int(together.num_accepted[row])
        assert int(alone.next_token) == int(together.next_token[row])


@pytest.mark.parametrize("rule", sorted(RULES))
def test_without_drafts_one_token_comes_from_p(rule: str) -> None:
    p = P[1, 2][None, None]
    none = torch.zeros(1, 0, dtype=torch.long)
    law = walk(lambda random: (int(verify(rule, none, P[:1, :0, :], p, random).next_token),))
    if rule == "greedy":
        assert law == {(int(p.argmax()),): 1.0}
    else:
        assert law == pytest.approx({(token,): float(p[0, 0, token]) for token in range(3)})
    batch = verify(rule, none.expand(4, 0), p.new_zeros(4, 0, 3), p.expand(4, 1, 3), RandomSource(0))
    assert batch.num_accepted.tolist() == [0] * 4
