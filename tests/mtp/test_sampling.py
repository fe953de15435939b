"""One road from logits to probabilities, and a random source without surprises.

Statistical checks state their false-alarm rate; the draws are seeded, so a check that passes once passes always.
"""

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from mtp.errors import UserError
from mtp.sampling import RandomSource, SamplingConfig, finite_rows, option, to_probs

VOCAB = 40


def reference(logits: torch.Tensor, config: SamplingConfig) -> torch.Tensor:
    """The processors of transformers in their order."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(config.temperature)])
    if config.top_k:
        chain.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1:
        chain.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        chain.append(MinPLogitsWarper(config.min_p))
    if config.typical_p < 1:
        chain.append(TypicalLogitsWarper(config.typical_p))
    if config.epsilon_cutoff:
        chain.append(EpsilonLogitsWarper(config.epsilon_cutoff))
    if config.eta_cutoff:
        chain.append(EtaLogitsWarper(config.eta_cutoff))
    return chain(torch.zeros(len(logits), 1, dtype=torch.long), logits).softmax(dim=-1)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB, 10 * VOCAB]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_probabilities_are_those_of_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    config = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(to_probs(logits, config), reference(logits, config), atol=1e-6, rtol=1e-4)


CUTOFFS = {
    "typical_p": st.sampled_from([0.1, 0.6, 0.95, 1.0]),
    "epsilon_cutoff": st.sampled_from([0.0, 0.01, 0.1, 0.99]),
    "eta_cutoff": st.sampled_from([0.0, 0.02, 0.3, 0.99]),
}


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    cutoffs=st.fixed_dictionaries(CUTOFFS),
)
def test_cutoffs_are_those_of_transformers(
    seed: int, temperature: float, min_p: float, cutoffs: dict[str, float]
) -> None:
    """For any leading shape, and with tokens that are impossible already; in float64, where no token is on the edge."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    logits[3:, seed % VOCAB :] = -math.inf
    logits[5] = -math.inf
    logits[:, seed % 7] = 1.0
    config = SamplingConfig(temperature=temperature, min_p=min_p, **cutoffs)
    probs, expected = to_probs(logits, config), reference(logits, config)
    torch.testing.assert_close(probs, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(to_probs(logits.view(1, 2, 3, VOCAB), config).view(6, VOCAB), probs)
    assert torch.equal(to_probs(logits[4], config), probs[4])


@pytest.mark.parametrize(
    ("option", "value"), [("typical_p", 0.3), ("epsilon_cutoff", 0.1), ("eta_cutoff", 0.3), ("min_p", 0.2)]
)
def test_each_cutoff_cuts(option: str, value: float) -> None:
    """The negative control of the test above: a cutoff left out would be seen."""
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cut = to_probs(logits, SamplingConfig(temperature=1.0, **{option: value}))
    assert float((cut - to_probs(logits, SamplingConfig(temperature=1.0))).abs().max()) > 0.01


def test_the_order_of_cutoffs_matters() -> None:
    """Typical-p of what min-p left is not min-p of what typical-p left; transformers applies it later."""
    logits = torch.log(torch.tensor([[0.4, 0.2, 0.15, 0.15, 0.1]], dtype=torch.float64))
    config = SamplingConfig(temperature=1.0, min_p=0.5, typical_p=0.2)
    assert to_probs(logits, config)[0].tolist() == pytest.approx([1, 0, 0, 0, 0])
    swapped = LogitsProcessorList([TypicalLogitsWarper(0.2), MinPLogitsWarper(0.5)])(None, logits).softmax(dim=-1)
    assert swapped[0, 0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize(
    "config",
    [
        {"typical_p": 1e-9},
        {"typical_p": 1 - 1e-9},
        {"epsilon_cutoff": 0.999},
        {"eta_cutoff": 0.999},
        {"top_k": 2, "top_p": 0.01, "min_p": 1.0, "typical_p": 0.01, "epsilon_cutoff": 0.999, "eta_cutoff": 0.999},
    ],
)
def test_a_row_that_was_a_distribution_stays_one(config: dict[str, float], scale: float, dtype: torch.dtype) -> None:
    """Next to rows that are none, at which nothing may raise."""
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0), dtype=dtype) * scale
    logits[0], logits[1, 3], logits[2, 3] = -math.inf, math.nan, math.inf
    logits[3, 1:], logits[4, 2:] = -math.inf, -math.inf
    for temperature in (1e-3, 1.0, 100.0):
        probs = to_probs(logits, SamplingConfig(temperature=temperature, **config))
        assert probs.dtype == dtype
        torch.testing.assert_close(probs[finite_rows(logits)].sum(dim=-1), torch.ones(47, dtype=dtype))
        assert (probs[3:][logits[3:] == -math.inf] == 0).all()


@pytest.mark.parametrize("temperature", [0.5, 50.0])
@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_top_p_of_a_large_vocabulary(temperature: float, top_p: float) -> None:
    """Sharp rows are cut among the first candidates, flat ones need the whole vocabulary."""
    logits = torch.randn(2, 5_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    config = SamplingConfig(temperature=temperature, top_p=top_p)
    torch.testing.assert_close(to_probs(logits, config), reference(logits, config))


def test_temperature_zero_is_one_hot_on_the_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, -math.inf, 0.0]])
    assert to_probs(logits, SamplingConfig()).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_precision_is_float32_or_better() -> None:
    for given_dtype, wanted in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        for temperature in (0.0, 1.0):
            probs = to_probs(torch.zeros(2, 4, dtype=given_dtype), SamplingConfig(temperature=temperature))
            assert probs.dtype == wanted


def test_half_precision_logits_keep_small_probabilities() -> None:
    """A probability of 1e-9 is 0 in half precision; the ratio of two such must survive."""
    logits = torch.tensor([0.0, math.log(1e-9)], dtype=torch.float16)
    small = float(to_probs(logits, SamplingConfig(temperature=1.0))[1])
    assert small == pytest.approx(1e-9, rel=0.02)


def test_tiny_temperature_does_not_overflow() -> None:
    probs = to_probs(torch.tensor([[100.0, 50.0, -80.0]]), SamplingConfig(temperature=1e-30))
    assert probs.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-46}, {"temperature": 1e39}, {"temperature": 1.0, "top_p": 1e-46}]
)
def test_numbers_that_float32_cannot_work_with_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UserError, match="use "):
        SamplingConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"temperature": 1e-30}, {"temperature": 1e30}, {"temperature": 1.0, "top_p": 1e-30}]
)
def test_the_bounds_themselves_are_taken(options: dict[str, float]) -> None:
    found = to_probs(torch.tensor([[1.0, 3.0, 2.0]]), SamplingConfig(**options))  # type: ignore[arg-type]
    hot = options["temperature"] == 1e30
    torch.testing.assert_close(found, torch.full((1, 3), 1 / 3) if hot else torch.tensor([[0.0, 1.0, 0.0]]))


def test_masked_tokens_stay_impossible() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5]])
    for config in (
        SamplingConfig(temperature=1.0),
        SamplingConfig(temperature=1.0, typical_p=0.999, eta_cutoff=0.001),
        SamplingConfig(temperature=2.0, top_k=3),
        SamplingConfig(temperature=1.0, top_p=0.999),
    ):
        assert to_probs(logits, config)[0, 1] == 0


def test_finite_rows() -> None:
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[0.0, 1.0], [0.0, -inf], [nan, 0.0], [inf, 0.0], [-inf, -inf], [-inf, nan]])
    assert finite_rows(rows).tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("typical_p", 0.0),
        ("typical_p", 1.01),
        ("typical_p", math.nan),
        ("epsilon_cutoff", -0.1),
        ("epsilon_cutoff", 1.0),
        ("eta_cutoff", -0.1),
        ("eta_cutoff", 1.0),
        ("eta_cutoff", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.2),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("no_repeat_ngram", -1),
        ("min_new_tokens", -2),
    ],
)
def test_values_out_of_range_are_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(UserError, match="--" + option.replace("_", "-")) as error:
        SamplingConfig(**{option: value})
    assert str(value) in str(error.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("suppress_tokens", (4, -3), "--suppress-tokens is given token id -3; use ids of the vocabulary, from 0 up."),
        ("bad_words_ids", ((1, -3),), "--bad-words is given token id -3; use ids of the vocabulary, from 0 up."),
        (
            "bad_words_ids",
            ((1,), ()),
            "--bad-words is given an empty sequence; use sequences of at least one token id.",
        ),
        ("logit_bias", {-3: 1.0}, "--logit-bias is given token id -3; use ids of the vocabulary, from 0 up."),
        ("logit_bias", {5: math.nan}, "--logit-bias is nan for token id 5; use finite numbers, or -inf to forbid."),
        ("logit_bias", {5: math.inf}, "--logit-bias is inf for token id 5; use finite numbers, or -inf to forbid."),
        ("repetition_penalty", -1.0, "--repetition-penalty is -1.0; use a positive number; 1 is off."),
        ("typical_p", 2.0, "--typical-p is 2.0; use a number above 0 and at most 1 (off)."),
        ("eta_cutoff", 1.0, "--eta-cutoff is 1.0; use a number from 0 (off) to below 1."),
    ],
)
def test_messages(option: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as error:
        SamplingConfig(**{option: value})
    assert str(error.value) == message


def test_every_option_has_help_and_its_own_default() -> None:
    python_only = {"prefix_allowed_tokens_fn", "processors"}
    for field in fields(SamplingConfig):
        assert field.metadata["help"], field.name
        assert field.metadata.get("python_only", False) == (field.name in python_only)
    assert SamplingConfig() == SamplingConfig(logit_bias={}, bad_words_ids=(), processors=())
    assert SamplingConfig().logit_bias is not SamplingConfig().logit_bias
    assert hash(SamplingConfig(logit_bias={1: 2.0})) == hash(SamplingConfig(logit_bias={1: 2.0}))
    assert option(1, "text", python_only=True).metadata == {"help": "text", "python_only": True}  # type: ignore[attr-defined]


def test_uniform_is_open_and_repeatable() -> None:
    draws = RandomSource(3).uniform((4, 50_000))
    assert draws.dtype == torch.float64
    assert 0 < float(draws.min()) < float(draws.max()) < 1
    assert torch.equal(draws, RandomSource(3).uniform((4, 50_000)))
    assert not torch.equal(draws, RandomSource(4).uniform((4, 50_000)))
    assert not torch.equal(RandomSource().uniform((8,)), RandomSource().uniform((8,)))


class Fixed(RandomSource):
    """Gives the same number for every draw."""

    def __init__(self, value: float) -> None:
        super().__init__(0)
        self.value = value

    def uniform(self, shape: object) -> torch.Tensor:
        return torch.full(tuple(shape), self.value, dtype=torch.float64)  # type: ignore[call-overload]


def test_uniform_never_gives_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape, dtype=torch.float64))
    assert float(RandomSource(0).uniform((1,))) > 0


def test_bernoulli_is_strict() -> None:
    """With `<=`, a draw of exactly 0 would accept a token that the base forbids."""
    prob = torch.tensor([0.0, 1e-300, 0.5, 1.0], dtype=torch.float64)
    assert Fixed(0.0).bernoulli(prob).tolist() == [False, True, True, True]
    assert Fixed(0.5).bernoulli(prob).tolist() == [False, False, False, True]
    assert Fixed(0.5).bernoulli(torch.tensor([math.nan])).tolist() == [False]


@pytest.mark.parametrize("draw", [2.0**-54, 0.25, 0.5, 0.75, 1 - 2.0**-53])
def test_categorical_never_gives_an_impossible_token(draw: float) -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1e-30]])
    ids = Fixed(draw).categorical(probs)
    assert (probs.gather(1, ids[:, None]) > 0).all()


def test_categorical_follows_unnormalised_weights() -> None:
    """Chi-square with 3 degrees of freedom over 200,000 draws; 16.27 is passed by chance once in 1,000 seeds."""
    weights = torch.tensor([0.2, 0.0, 0.6, 1.0, 0.2])
    count = 200_000
    ids = RandomSource(5).categorical(weights.expand(count, -1))
    seen = torch.bincount(ids, minlength=5).double()
    expected = weights.double() / weights.sum() * count
    assert seen[1] == 0

    def chi_square(law: torch.Tensor) -> float:
        possible = law > 0
        return float(((seen - law)[possible] ** 2 / law[possible]).sum())

    assert chi_square(expected) < 16.27
    wrong = torch.tensor([0.22, 0.0, 0.6, 0.98, 0.2], dtype=torch.float64) / 2 * count
    assert chi_square(wrong) > 16.27  # the negative control: off by 0.01 in two places


def test_both_sides_take_the_same_draws() -> None:
    """The same logits through the road of the base ([K, V]) and of a draft ([V]) give the same tokens, 1e5 times."""
    logits = torch.randn(100_000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    config = SamplingConfig(temperature=0.8, top_p=0.9)
    together = RandomSource(1).categorical(to_probs(logits[None], config)[0])
    apart = RandomSource(1).categorical(to_probs(logits.float(), config))
    assert torch.equal(together, apart)
