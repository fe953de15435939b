"""Processors that look at the text: the same distributions as transformers' `generate`, asked in any order.

The reference is the list that `generate` itself would build. Small vocabulary, short texts, float64.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as stock

from mtp.errors import UserError
from mtp.processors import STATELESS, TextProcessors
from mtp.sampling import SamplingConfig, finite_rows, to_probs
from tests.tiny import tiny_model

VOCAB, PROMPT, EOS = 12, 2, (3, 7)
INF = math.inf


def even_after_even(batch: int, text: Tensor) -> list[int]:
    """A prefix constraint: the parity of the last token, and the ends of text."""
    assert batch == 0
    assert text.dim() == 1
    return sorted({*range(int(text[-1]) % 2, VOCAB, 2), *EOS})


def soften(text: Tensor, logits: Tensor) -> Tensor:
    """A user's processor that writes into its argument."""
    logits[:, 1:] *= 0.5
    logits[:, 1:] -= 0.5
    return logits


OPTIONS: dict[str, Any] = {
    "logit_bias": {0: 1.5, 4: -2.0, 5: 0.1},
    "repetition_penalty": 1.3,
    "no_repeat_ngram": 2,
    "bad_words_ids": ((1,), (3,), (2, 6), (0, 1, 2)),
    "min_new_tokens": 2,
    "prefix_allowed_tokens_fn": even_after_even,
    "suppress_tokens": (8, 9),
    "processors": (soften,),
}
CONFIG_NAMES = {"no_repeat_ngram": "no_repeat_ngram_size"}
ONE_EACH = {"num_beams": 1, "num_return_sequences": 1}


def built(options: dict[str, Any], temperature: float = 0.8, **more: Any) -> tuple[SamplingConfig, TextProcessors]:
    sampling = SamplingConfig(temperature=temperature, **options, **more)
    return sampling, TextProcessors(sampling, PROMPT, EOS, VOCAB, "cpu")


def ours(options: dict[str, Any], text: Tensor, logits: Tensor, **more: Any) -> Tensor:
    sampling, processors = built(options, **more)
    return to_probs(processors(text, logits), sampling)


def generate_list(
    options: dict[str, Any], eos: tuple[int, ...] = EOS, temperature: float = 0.8, **more: Any
) -> stock.LogitsProcessorList:
    """What `generate` would apply to a prompt of PROMPT tokens."""
    options = dict(options)
    own, prefix = options.pop("processors", ()), options.pop("prefix_allowed_tokens_fn", None)
    named = {CONFIG_NAMES.get(name, name): value for name, value in options.items()}
    if "logit_bias" in named:
        named["sequence_bias"] = [[[token], bias] for token, bias in named.pop("logit_bias").items()]
    if "bad_words_ids" in named:
        named["bad_words_ids"] = [list(word) for word in named["bad_words_ids"]]
    if "suppress_tokens" in named:
        named["suppress_tokens"] = list(named["suppress_tokens"])
    model = tiny_model("llama")
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=0, eos_token_id=list(eos), **ONE_EACH, **named, **more
    )
    model._prepare_special_tokens(config, device="cpu")
    return model._get_logits_processor(
        config,
        input_ids_seq_length=PROMPT,
        prefix_allowed_tokens_fn=prefix,
        logits_processor=stock.LogitsProcessorList(own),
        device="cpu",
    )


def theirs(chain: stock.LogitsProcessorList, text: Tensor, logits: Tensor) -> Tensor:
    """Row by row, as `generate` has them for one text."""
    rows = [chain(text[row : row + 1], logits[row : row + 1].clone()) for row in range(len(text))]
    return torch.cat(rows).softmax(dim=-1)


def cases(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Texts of 1 to 6 tokens out of few ids, so that they repeat, for 1 and 3 rows."""
    random = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, 6, (rows, length), generator=random),
            3 * torch.randn(rows, VOCAB, generator=random, dtype=dtype),
        )
        for length in range(1, 7)
        for rows in (1, 3)
        for _ in range(10)
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_each_alone_is_that_of_generate(name: str) -> None:
    """And, as a control, it makes a difference to some of the texts."""
    options = {name: OPTIONS[name]}
    chain, differences = generate_list(options), []
    for text, logits in cases():
        probs = ours(options, text, logits)
        torch.testing.assert_close(probs, theirs(chain, text, logits), rtol=1e-12, atol=1e-12)
        differences.append(float((probs - ours({}, text, logits)).abs().max()))
    assert max(differences) > 0.01


WARPERS = {"typical_p": 0.8, "epsilon_cutoff": 0.03, "eta_cutoff": 0.1, "min_p": 0.02, "top_p": 0.95}


@pytest.mark.parametrize("warpers", [{}, WARPERS])
def test_all_at_once_are_those_of_generate(warpers: dict[str, float]) -> None:
    chain = generate_list(OPTIONS, **warpers)
    assert len(chain) == len(OPTIONS) + 1 + len(warpers)
    for text, logits in cases():
        probs = ours(OPTIONS, text, logits, **warpers)
        assert probs.isfinite().all()
        torch.testing.assert_close(probs, theirs(chain, text, logits), rtol=1e-12, atol=1e-12)
        assert probs.sum(dim=-1).allclose(torch.ones(len(text), dtype=torch.float64))


def only(token: int) -> tuple[Tensor, Tensor]:
    """A text, and logits that leave nothing but `token`."""
    logits = torch.full((1, VOCAB), -INF, dtype=torch.float64)
    return torch.tensor([[0]]), logits.index_fill(1, torch.tensor([token]), 0.0)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("SequenceBiasLogitsProcessor", "RepetitionPenaltyLogitsProcessor"),
        ("PrefixConstrainedLogitsProcessor", "SuppressTokensLogitsProcessor"),
        ("RepetitionPenaltyLogitsProcessor", "function"),
    ],
)
def test_the_order_matters(first: str, second: str) -> None:
    """The negative control of the test above: where two do not commute, another order is another distribution."""
    chain = list(generate_list(OPTIONS))
    names = [type(processor).__name__ for processor in chain]
    a, b = names.index(first), names.index(second)
    chain[a], chain[b] = chain[b], chain[a]
    swapped = stock.LogitsProcessorList(chain)
    if "Suppress" in second:
        # 8 is allowed after 0, but suppressed: the later of the two has the last word.
        assert theirs(swapped, *only(8)).isfinite().all()
        assert ours(OPTIONS, *only(8)).isnan().all()
    else:
        assert max(float((ours(OPTIONS, *case) - theirs(swapped, *case)).abs().max()) for case in cases()) > 1e-3


def test_an_unsatisfiable_prefix_is_forced_as_in_generate() -> None:
    """Where earlier bans leave nothing of what is allowed, the constraint wins."""
    options = {"bad_words_ids": ((4,),), "prefix_allowed_tokens_fn": lambda _, text: [4]}
    text, logits = torch.tensor([[0, 1], [2, 1]]), torch.randn(2, VOCAB, dtype=torch.float64)
    assert ours(options, text, logits)[:, 4].tolist() == [1, 1]
    torch.testing.assert_close(ours(options, text, logits), theirs(generate_list(options), text, logits))


def counted(sampling: SamplingConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Presence and frequency penalties, token by token."""

    def apply(text: Tensor, logits: Tensor) -> Tensor:
        changed = logits.clone()
        for row, ids in enumerate(text[:, PROMPT:].tolist()):
            for token in set(ids):
                changed[row, token] -= sampling.presence_penalty + sampling.frequency_penalty * ids.count(token)
        return changed

    return apply


def test_presence_and_frequency_by_hand() -> None:
    """Prompt 5 5, generated 1 2 1: once for being there, and once for each time."""
    options = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    text = torch.tensor([[5, 5, 1, 2, 1]])
    changed = built(options)[1](text, torch.ones(1, VOCAB, dtype=torch.float64))[0]
    assert changed.tolist() == [1, 0, 0.25, *[1] * 9]
    only_prompt = built(options)[1](text[:, :PROMPT], torch.ones(1, VOCAB))
    assert only_prompt.tolist() == [[1] * VOCAB]
    assert built({"presence_penalty": -0.5})[1](text, torch.zeros(1, VOCAB))[0, :3].tolist() == [0, 0.5, 0.5]


def test_all_with_presence_and_frequency_in_their_place() -> None:
    """They follow the repetition penalty, with which they do not commute."""
    options = OPTIONS | {"presence_penalty": 0.7, "frequency_penalty": 0.3}
    chain = generate_list(OPTIONS)
    at = [type(processor).__name__ for processor in chain].index("RepetitionPenaltyLogitsProcessor")
    penalty = counted(built(options)[0])
    right = stock.LogitsProcessorList([*chain[: at + 1], penalty, *chain[at + 1 :]])
    wrong = stock.LogitsProcessorList([*chain[:at], penalty, *chain[at:]])
    gaps = []
    for text, logits in cases():
        probs = ours(options, text, logits)
        torch.testing.assert_close(probs, theirs(right, text, logits), rtol=1e-12, atol=1e-12)
        gaps.append(float((probs - theirs(wrong, text, logits)).abs().max()))
    assert max(gaps) > 1e-3


ALL = OPTIONS | {"presence_penalty": 0.7, "frequency_penalty": 0.3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_do_not_see_each_other(dtype: torch.dtype) -> None:
    """Bit for bit, with one object for all texts, and longer texts before shorter ones."""
    sampling, processors = built(ALL, **WARPERS)
    for text, logits in reversed(cases(dtype)):
        together = to_probs(processors(text, logits), sampling)
        assert together.dtype == dtype
        for row in range(len(text)):
            apart = to_probs(built(ALL)[1](text[row : row + 1], logits[row : row + 1]), sampling)
            assert torch.equal(together[row : row + 1], apart)


@pytest.mark.parametrize("name", ALL)
def test_arguments_stay_as_they_are(name: str) -> None:
    def scribble(text: Tensor, logits: Tensor) -> Tensor:
        text.zero_()
        return logits.zero_()

    def scribble_and_allow(_: int, text: Tensor) -> list[int]:
        return [1, 2] if text.zero_().dim() else []

    value = {"processors": (soften, scribble), "prefix_allowed_tokens_fn": scribble_and_allow}.get(name, ALL[name])
    for text, logits in cases():
        text_before, logits_before = text.clone(), logits.clone()
        built({name: value})[1](text, logits)
        assert torch.equal(text, text_before)
        assert torch.equal(logits, logits_before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_processed_in_float32(dtype: torch.dtype) -> None:
    text, logits = torch.tensor([[1, 2]]), torch.randn(1, VOCAB).to(dtype)
    assert torch.equal(built(ALL)[1](text, logits), built(ALL)[1](text, logits.float()))
    assert built({})[1](text, logits).dtype == torch.float32


def test_penalties_act_on_greedy_decoding_and_truncations_do_not() -> None:
    text, logits = torch.tensor([[5, 5, 1]]), torch.zeros(1, VOCAB).index_fill(1, torch.tensor([1]), 1.0)
    assert ours({}, text, logits, temperature=0.0)[0, 1] == 1
    assert ours(WARPERS, text, logits, temperature=0.0)[0, 1] == 1
    assert ours({"presence_penalty": 2.0}, text, logits, temperature=0.0)[0, 0] == 1


def test_a_row_may_end_with_everything_masked() -> None:
    """Not an exception: the text may hold a draft that is going to be rejected."""
    _, processors = built({"prefix_allowed_tokens_fn": lambda _, text: [] if text[-1] == 1 else [4, 5]})
    masked = processors(torch.tensor([[0, 1], [1, 0], [1, 1]]), torch.randn(3, VOCAB, dtype=torch.float64))
    assert finite_rows(masked).tolist() == [False, True, False]
    assert masked[0].tolist() == [-INF] * VOCAB
    _, processors = built({"suppress_tokens": tuple(range(VOCAB))})
    assert not finite_rows(processors(torch.tensor([[0]]), torch.randn(1, VOCAB))).any()


def test_nan_of_a_users_processor_is_seen_as_such() -> None:
    def broken(text: Tensor, logits: Tensor) -> Tensor:
        return torch.where(text[:, -1:] == 1, math.nan, logits)

    sampling, processors = built({"processors": (broken,), **WARPERS})
    changed = processors(torch.tensor([[0, 1], [1, 0]]), torch.randn(2, VOCAB))
    assert finite_rows(changed).tolist() == [False, True]
    assert to_probs(changed, sampling)[1].sum() == pytest.approx(1)


class Narrow:
    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        return logits[:, :-1]


class Silent:
    def __call__(self, text: Tensor, logits: Tensor) -> None:
        logits[:, 0] = 0.0


@pytest.mark.parametrize(("processor", "got"), [(Narrow(), r"Narrow.*\[3, 11\]"), (Silent(), "Silent.*NoneType")])
def test_another_shape_is_refused_by_name(processor: Any, got: str) -> None:
    with pytest.raises(UserError, match=got + r".*return.*\[3, 12\]"):
        built({"processors": (processor,)})[1](torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, VOCAB))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_prefix_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UserError, match=f"prefix_allowed_tokens_fn.*{token}.*from 0 to {VOCAB - 1}"):
        built({"prefix_allowed_tokens_fn": lambda _, text: [2, token]})[1](torch.tensor([[0]]), torch.zeros(1, VOCAB))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"suppress_tokens": (0, VOCAB)}, "--suppress-tokens"),
        ({"bad_words_ids": ((0,), (1, VOCAB))}, "--bad-words"),
        ({"logit_bias": {VOCAB: 1.0}}, "--logit-bias"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is given token id {VOCAB};.*from 0 to {VOCAB - 1}"):
        built(options)


def test_one_thing_asked_for_in_two_ways_is_refused() -> None:
    """`generate` would drop the option without an error."""
    own = (stock.RepetitionPenaltyLogitsProcessor(1.1),)
    with pytest.raises(UserError, match="RepetitionPenaltyLogitsProcessor.*one of the two"):
        built({"repetition_penalty": 1.3, "processors": own})
    assert built({"no_repeat_ngram": 2, "processors": own})[1].active


def test_active() -> None:
    assert not built({})[1].active
    assert not built({}, top_k=3, **WARPERS)[1].active
    for name, value in ALL.items():
        assert built({name: value})[1].active, name
    sampling = SamplingConfig(min_new_tokens=3)
    assert not TextProcessors(sampling, PROMPT, (), VOCAB, "cpu").active  # no end of text that could be forbidden
    only_eos = SamplingConfig(bad_words_ids=((3,), (7,)))
    assert not TextProcessors(only_eos, PROMPT, EOS, VOCAB, "cpu").active
    logits = torch.randn(2, VOCAB)
    assert torch.equal(built({})[1](torch.zeros(2, 3, dtype=torch.long), logits), logits)


class Warper(stock.TopKLogitsWarper):
    """A subclass may have added state."""


class Declared(Warper):
    stateless = True


@pytest.mark.parametrize(
    ("processors", "stateful"),
    [
        ((), False),
        ((stock.TopKLogitsWarper(3), stock.InfNanRemoveLogitsProcessor()), False),
        ((soften,), True),
        ((Warper(3),), True),
        ((Declared(3),), False),
        ((stock.PrefixConstrainedLogitsProcessor(even_after_even, 1),), True),
        ((stock.TopKLogitsWarper(3), Narrow()), True),
    ],
)
def test_stateful(processors: tuple[Any, ...], stateful: bool) -> None:
    assert built({"processors": processors})[1].stateful is stateful
    assert not built({name: value for name, value in ALL.items() if name != "processors"})[1].stateful


INSTANCES = [
    stock.EpsilonLogitsWarper(0.05),
    stock.EtaLogitsWarper(0.1),
    stock.ExponentialDecayLengthPenalty((1, 1.5), [3], PROMPT),
    stock.ForcedBOSTokenLogitsProcessor(4),
    stock.ForcedEOSTokenLogitsProcessor(6, 3),
    stock.InfNanRemoveLogitsProcessor(),
    stock.LogitNormalization(),
    stock.MinLengthLogitsProcessor(4, [3]),
    stock.MinNewTokensLengthLogitsProcessor(PROMPT, 2, [3]),
    stock.MinPLogitsWarper(0.1),
    stock.NoBadWordsLogitsProcessor([[1], [2, 3]]),
    stock.NoRepeatNGramLogitsProcessor(2),
    stock.RepetitionPenaltyLogitsProcessor(1.3),
    stock.SequenceBiasLogitsProcessor({(1,): 1.0, (2, 3): -1.0}),
    stock.SuppressTokensAtBeginLogitsProcessor([1], PROMPT),
    stock.SuppressTokensLogitsProcessor([1]),
    stock.TemperatureLogitsWarper(0.7),
    stock.TopHLogitsWarper(0.4),
    stock.TopKLogitsWarper(3),
    stock.TopPLogitsWarper(0.8),
    stock.TypicalLogitsWarper(0.8),
    stock.WatermarkLogitsProcessor(VOCAB, "cpu"),
]


@pytest.mark.parametrize("processor", INSTANCES, ids=lambda processor: type(processor).__name__)
def test_classes_listed_as_stateless_are(processor: Any) -> None:
    """The same answers in any order, and for rows together or one by one."""
    _, processors = built({"processors": (processor,)})
    assert not processors.stateful
    every = cases()[::5]
    first = [processors(text, logits) for text, logits in every]
    for (text, logits), before in zip(reversed(every), reversed(first), strict=True):
        rows = [processors(text[row : row + 1], logits[row : row + 1]) for row in range(len(text))]
        torch.testing.assert_close(torch.cat(rows), before, rtol=1e-12, atol=1e-12)


def test_each_stateless_class_has_been_checked() -> None:
    assert {type(processor) for processor in INSTANCES} == set(STATELESS)
