"""Reproducible decoding: the text of a seed is a function of the base, the prompt and the settings of p alone."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from decode import Decoder
from decode.chi_square import chi_square
from decode.engine import Engine
from decode.request import Request
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.initialise import new_heads
from mtp.keyed import KeyedSource, exponentials
from mtp.sampling import RandomSource
from mtp.verify import Rule, Verdict, at_row
from tests.decode.toys import TableDrafter, TableTarget, decode, table
from tests.tiny import exact_base

pytestmark = pytest.mark.usefixtures("one_thread")
K, PROMPT, TOKENS = 3, "the user", 24
FALSE_ALARM = 1e-4
"""Chance that a chi-square test below fails on a decoder that is right, over seeds; the seeds are fixed."""

WARM = Request(max_new_tokens=TOKENS, temperature=1.0, seed=5, reproducible=True, ignore_eos=True)


class Alternate:
    """A processor of which every draft depends on the draft before: half of all tokens, which half by the last one."""

    stateless = True

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        return logits.masked_fill((torch.arange(logits.shape[1]) + text[:, -1:]) % 2 == 0, -torch.inf)


BUSY = replace(WARM, temperature=0.8, top_p=0.9, repetition_penalty=1.3, no_repeat_ngram=3, processors=(Alternate(),))


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    """In float64, so that no race is decided by rounding."""
    return exact_base("llama")


@pytest.fixture(scope="module")
def decoders(base: FrozenBase) -> dict[str, Decoder]:
    def with_heads(seed: int, kind: str, draft_ids: Tensor | None = None) -> Decoder:
        torch.manual_seed(seed)
        heads = new_heads(HeadsOptions(kind=kind, draft_length=K), base, draft_ids).double()  # type: ignore[arg-type]
        return Decoder(base, heads.bind(base.embedding, base.output_matrix))

    return {
        "none": Decoder(base),
        "recurrent": with_heads(0, "recurrent"),
        "other seed": with_heads(1, "recurrent"),
        "medusa": with_heads(0, "medusa"),
        "draft vocabulary": with_heads(0, "recurrent", torch.arange(3, 40)),
    }


WAYS: dict[str, tuple[str, dict[str, object]]] = {
    **{f"K = {k}": ("recurrent", {"draft_length": k}) for k in range(K + 1)},
    **{name: (name, {}) for name in ("other seed", "medusa", "draft vocabulary")},
    **{f"tree {tree}": ("recurrent", {"tree": tree}) for tree in ("3", "2,2,1", "dynamic:8")},
    "tree of medusa": ("medusa", {"tree": "2,2,1"}),
    "tree in a draft vocabulary": ("draft vocabulary", {"tree": "dynamic:8"}),
    **{f"draft temperature {heat}": ("recurrent", {"draft_temperature": heat}) for heat in (0.0, 0.5, 2.0)},
    "tree and draft temperature": ("recurrent", {"tree": "2,2,1", "draft_temperature": 2.0}),
    "confident": ("recurrent", {"draft_min_confidence": 0.2}),
    "low entropy": ("recurrent", {"draft_max_entropy": 3.5}),
    "likely": ("recurrent", {"draft_min_prob": 0.1}),
    "named match": ("recurrent", {"verify": "match"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_that_of_plain_decoding(decoders: dict[str, Decoder], way: str) -> None:
    name, options = WAYS[way]
    for request in (WARM, BUSY):
        expected = decoders["none"].generate(PROMPT, request)
        result = decoders[name].generate(PROMPT, request, **options)
        assert result.token_ids == expected.token_ids
        assert result.stats.rule == "match"
        assert (result.stats.drafted > 0) == (way != "K = 0")


def test_the_drafts_do_matter_for_speed(decoders: dict[str, Decoder]) -> None:
    """Otherwise the test above would compare nothing but rejections."""
    accepted = [
        decoders[name].generate(PROMPT, WARM, max_new_tokens=40, **options).stats.accepted
        for name, options in WAYS.values()
    ]
    assert sum(count > 0 for count in accepted) >= 14  # of 20 ways, in one text of each
    assert len(set(accepted)) > 4


def test_plain_decoding_is_the_race_of_the_keyed_exponentials(decoders: dict[str, Decoder], base: FrozenBase) -> None:
    """Token by token, without the engine: argmin E / p with the noise of (seed, absolute position)."""
    text: list[int] = list(base.tokenizer(PROMPT)["input_ids"])
    result = decoders["none"].generate(text, WARM)
    for token in result.token_ids:
        hidden = base.forward(torch.tensor([text])).hidden
        p = base.logits(hidden[:, -1])[0].softmax(dim=-1)
        assert token == int((torch.from_numpy(exponentials(5, len(text), len(p))) / p).argmin())
        text.append(token)


def test_a_text_can_be_taken_up_anywhere(decoders: dict[str, Decoder], base: FrozenBase) -> None:
    """Positions are absolute: a prompt that holds the first tokens goes on with the rest, whatever drafts."""
    prompt = list(base.tokenizer(PROMPT)["input_ids"])
    whole = decoders["none"].generate(prompt, WARM).token_ids
    for taken in (1, 5, 11):
        rest = decoders["medusa"].generate([*prompt, *whole[:taken]], WARM, max_new_tokens=TOKENS - taken)
        assert rest.token_ids == whole[taken:]


def test_seeds_differ(decoders: dict[str, Decoder]) -> None:
    texts = [tuple(decoders["recurrent"].generate(PROMPT, WARM, seed=seed).token_ids) for seed in range(6)]
    assert len(set(texts)) == 6


def test_greedy_needs_no_seed(decoders: dict[str, Decoder]) -> None:
    for options in ({"reproducible": True}, {"reproducible": True, "seed": 3, "verify": "greedy"}):
        result = decoders["recurrent"].generate(PROMPT, max_new_tokens=8, **options)
        assert result.token_ids == decoders["none"].generate(PROMPT, max_new_tokens=8).token_ids
        assert result.stats.rule == "greedy"


def test_a_seed_is_needed_and_no_other_rule_is_taken(decoders: dict[str, Decoder]) -> None:
    with pytest.raises(UserError, match="--reproducible needs a seed"):
        decoders["recurrent"].stream(PROMPT, temperature=1.0, reproducible=True)
    for rule in ("block", "token", "lossy-typical"):
        with pytest.raises(UserError, match=f"by match, but --verify is {rule}; leave one of them out"):
            decoders["recurrent"].stream(PROMPT, WARM, verify=rule)


# ---- the law over seeds ------------------------------------------------------------------------------------------

P, Q = table(0, 4), table(1, 4)
NEW, SEEDS = 2, 1_500


def p_value(source: Callable[[int], RandomSource], draft_length: int, tree: str | None, rule: Rule | None) -> float:
    """Chi-square of the joint law of the first tokens over seeds, against the product of p's conditionals."""
    request = Request(temperature=1.0, seed=0, reproducible=True, tree=tree)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(SEEDS):
        engine = Engine(TableTarget(P), TableDrafter(Q), rule)
        counts[decode(engine, [1, 2], NEW, draft_length, request=request, random=source(seed))[0]] += 1
    soft = P.softmax(dim=-1)
    law = {(a, b): float(soft[1, 2, a] * soft[2, a, b]) for a, b in product(range(4), repeat=NEW)}
    return chi_square(counts, law).p_value


class Stuck(KeyedSource):
    """The fault that the joint law must expose: every position has the same noise."""

    def seek(self, *positions: int) -> None:
        super().seek(*[0] * len(positions))


def keep_all(draft_tokens: Tensor, q: Tensor, p: Tensor, random: RandomSource, lengths: Tensor) -> Verdict:
    """Every draft stays, so that the text follows q."""
    return Verdict(lengths, random.categorical(at_row(p, lengths)), torch.zeros_like(lengths, dtype=torch.bool))


@pytest.mark.parametrize(("draft_length", "tree"), [(0, None), (2, None), (2, "2,1")])
def test_over_seeds_the_text_follows_p(draft_length: int, tree: str | None) -> None:
    assert p_value(KeyedSource, draft_length, tree, None) > FALSE_ALARM


def test_over_seeds_faults_show() -> None:
    """The negative controls, through the same function."""
    assert p_value(Stuck, 0, None, None) < FALSE_ALARM
    assert p_value(KeyedSource, 2, None, keep_all) < FALSE_ALARM


def test_coupled_drafts_are_kept_more_often_than_independent_ones() -> None:
    """p and q that do not depend on the text: independent draws agree sum p q of the time. 4 sigma of 1,500 is 0.05."""
    p, q = torch.tensor([0.5, 0.25, 0.15, 0.1]).double(), torch.tensor([0.3, 0.3, 0.3, 0.1]).double()
    independent = float((p * q).sum())
    engine = Engine(TableTarget(p.log().expand(4, 4, 4)), TableDrafter(q.log().expand(4, 4, 4)))
    request = Request(temperature=1.0, seed=0, reproducible=True)
    coupled = decode(engine, [0, 1], 2_500, 1, request=request, random=KeyedSource(0))[1]
    other = decode(engine, [0, 1], 2_500, 1, request=request, random=RandomSource(0))[1]
    assert other.accepted_per_position[0] == pytest.approx(independent, abs=0.05)
    assert coupled.accepted_per_position[0] > independent + 0.25
    assert coupled.steps < other.steps
