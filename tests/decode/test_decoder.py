"""`Decoder` on a small real base with saved heads: texts, seeds, settings and refusals."""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import zip_longest
from pathlib import Path

import pytest
import torch

from decode import Decoder
from decode.drafters import HeadsDrafter
from decode.request import Request
from mtp.base import FrozenBase
from mtp.config import BaseRef, HeadsOptions
from mtp.errors import UserError
from mtp.heads import build_heads
from mtp.hub import load_heads, save_heads
from mtp.initialise import new_heads
from tests.tiny import CONTEXT, exact_base, tiny_base

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a saved base in llama-0 and heads for it in heads."""
    folder = tmp_path_factory.mktemp("decoder")
    base = tiny_base("llama", folder)
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=3), base, torch.arange(2, 60)), folder / "heads")
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    return Decoder.from_pretrained(folder / "heads", device="cpu")


def test_the_base_is_found_by_the_name_in_the_heads(decoder: Decoder, folder: Path) -> None:
    assert decoder.base.name == str(folder / "llama-0")
    assert decoder.generate("hi", max_new_tokens=1).stats.draft_length == 3


def test_result_is_consistent(decoder: Decoder) -> None:
    result = decoder.generate("the user", max_new_tokens=40, temperature=1.0, seed=1)
    assert result.finish_reason in {"length", "eos"}
    assert result.stats.committed == len(result.token_ids) <= 40
    assert 1 < result.stats.accept_len <= 4
    assert 0 < result.stats.accepted < result.stats.drafted
    assert result.text == decoder.base.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    assert result.prompt_tokens > len(decoder.base.tokenizer("the user")["input_ids"])  # the template


def test_pieces_add_up_to_the_result(decoder: Decoder) -> None:
    stream = decoder.stream("the user", max_new_tokens=30, temperature=1.0, seed=2)
    pieces = list(stream)
    result = stream.result
    assert result.token_ids == decoder.generate("the user", max_new_tokens=30, temperature=1.0, seed=2).token_ids
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert sum(sum(piece.drafted) for piece in pieces) == result.stats.accepted
    assert len(pieces) == result.stats.steps


def test_seed_repeats_and_changes_the_text(decoder: Decoder) -> None:
    def ids(seed: int | None) -> list[int]:
        return decoder.generate("hi", max_new_tokens=30, temperature=1.0, seed=seed).token_ids

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)
    assert ids(None) != ids(None)


WARM = {"max_new_tokens": 30, "temperature": 1.0, "seed": 1}
TRUNCATIONS = {"top_k": 1, "top_p": 0.01, "min_p": 1.0}
CHANGES_TEXT: dict[str, object] = {
    **TRUNCATIONS,
    "temperature": 1.5,
    "typical_p": 0.1,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.9,
    "repetition_penalty": 3.0,
    "presence_penalty": 9.0,
    "frequency_penalty": 9.0,
    "no_repeat_ngram": 1,
    "bad_words_ids": [[token] for token in range(30, 50)],
    "suppress_tokens": list(range(30, 50)),
    "logit_bias": {7: 9.0},
    "bad_words": ["a", "e", "t", "3", "1"],
    "prefix_allowed_tokens_fn": lambda row, text: list(range(3, 20)),
    "processors": [lambda text, logits: -logits],
    "max_new_tokens": 7,
    "seed": 2,
    "draft_length": 1,
    "verify": "token",
    "reproducible": True,
    "tree": "3,2,1",
    "draft_temperature": 0.1,
    "draft_min_confidence": 0.2,
    "draft_max_entropy": 3.0,
    "draft_min_prob": 0.2,
    "chat": False,
}
"""Drafting options are among them: with the same seed the draws serve other purposes."""
ELSEWHERE = {"stop", "stop_ids", "stop_when", "ignore_eos", "min_new_tokens", "logprobs", "lookup"}
"""Effects that depend on the text or are no tokens; each has a test of its own, below, in test_stop_matrix.py or
test_lookup.py."""


def test_every_option_has_a_test_of_its_effect() -> None:
    assert CHANGES_TEXT.keys() | ELSEWHERE == {item.name for item in fields(Request)}


@pytest.mark.parametrize("name", CHANGES_TEXT)
def test_every_setting_has_an_effect(decoder: Decoder, name: str) -> None:
    plain = decoder.generate("hi", **WARM)
    changed = decoder.generate("hi", **(WARM | {name: CHANGES_TEXT[name]}))
    assert plain.token_ids != changed.token_ids
    assert plain.token_ids == decoder.generate("hi", **WARM).token_ids
    if name in TRUNCATIONS:  # so strict that only the likeliest token is left
        greedy = decoder.generate("hi", max_new_tokens=30)
        assert changed.token_ids == greedy.token_ids
        assert (changed.stats.rule, greedy.stats.rule) == ("block", "greedy")


@pytest.mark.parametrize(
    "name", ["top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "seed", "verify"]
)
def test_what_has_no_effect_at_temperature_zero(decoder: Decoder, name: str) -> None:
    """As documented in SamplingConfig and Request: truncations, and who judges."""
    result = decoder.generate("hi", max_new_tokens=30, **{name: CHANGES_TEXT[name]})
    assert result.token_ids == decoder.generate("hi", max_new_tokens=30).token_ids
    assert result.stats.rule == "greedy"


@pytest.mark.parametrize(
    ("name", "value"), [("draft_min_confidence", 0.2), ("draft_max_entropy", 3.5), ("draft_min_prob", 0.2)]
)
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_adaptive_drafting_drafts_less(decoder: Decoder, name: str, value: float, temperature: float) -> None:
    settings = {"max_new_tokens": 40, "temperature": temperature, "seed": 1, "ignore_eos": True}
    whole = decoder.generate("hi", **settings).stats
    less = decoder.generate("hi", **settings, **{name: value}).stats
    assert less.drafted / less.steps < 0.8 * whole.drafted / whole.steps
    assert less.unusable_q == 0


@pytest.mark.parametrize(
    "options", [{}, {"draft_max_entropy": 1.0}, {"draft_min_prob": 0.5}, {"draft_min_confidence": 0.5}]
)
def test_broken_heads_are_counted_whatever_limits_drafting(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, options: dict[str, float]
) -> None:
    monkeypatch.setattr(HeadsDrafter, "draft", lambda *_: torch.full((1, 58), torch.nan))
    stats = decoder.generate("hi", max_new_tokens=10, temperature=1.0, seed=1, ignore_eos=True, **options).stats
    assert (stats.steps, stats.unusable_q, stats.drafted) == (10, 9, 0)  # the last step has no room to draft


def test_no_end_before_min_new_tokens(decoder: Decoder) -> None:
    eos = decoder.base.eos_token_ids[0]
    settings = {"max_new_tokens": 12, "logit_bias": {eos: 50.0}}
    assert decoder.generate("hi", **settings).token_ids == [eos]
    later = decoder.generate("hi", **settings, min_new_tokens=6)
    assert (len(later.token_ids), later.finish_reason) == (7, "eos")
    assert decoder.generate("hi", **settings, ignore_eos=True).token_ids == [eos] * 12


def test_settings_come_as_a_request_or_by_name(decoder: Decoder) -> None:
    """Names change the request that is given; the request itself stays."""
    request = Request(**WARM)
    assert decoder.generate("hi", request).token_ids == decoder.generate("hi", **WARM).token_ids
    changed = decoder.generate("hi", request, seed=2, max_new_tokens=9)
    assert changed.token_ids == decoder.generate("hi", max_new_tokens=9, temperature=1.0, seed=2).token_ids
    assert request == Request(**WARM)
    assert decoder.generate("hi", Request()).token_ids == decoder.generate("hi").token_ids


def test_drafting_does_not_change_greedy_text(decoder: Decoder) -> None:
    """Float64 would make this exact; in float32 this base has no near ties in these 60 tokens."""
    drafted = decoder.generate("the user", max_new_tokens=60)
    plain = decoder.generate("the user", max_new_tokens=60, draft_length=0)
    assert drafted.token_ids == plain.token_ids
    assert plain.stats.accept_len == 1.0
    assert plain.stats.drafted == 0


def test_chat_switch_and_token_ids(decoder: Decoder) -> None:
    raw = decoder.generate("hi", max_new_tokens=5, chat=False)
    ids = decoder.base.tokenizer("hi")["input_ids"]
    assert raw.prompt_tokens == len(ids)
    assert raw.token_ids == decoder.generate(ids, max_new_tokens=5).token_ids


def test_stop_string_stays_at_the_end(decoder: Decoder) -> None:
    whole = decoder.generate("hi", max_new_tokens=40, draft_length=0)
    stop = whole.text[5:8]
    cut = decoder.generate("hi", max_new_tokens=40, stop=[stop])
    assert cut.finish_reason == "stop"
    assert stop in cut.text
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop not in decoder.base.tokenizer.decode(cut.token_ids[:-1])


def test_end_of_sequence_id_is_kept_and_not_shown(decoder: Decoder) -> None:
    """Seeds until a text ends by itself, which this base does about once in 64 tokens."""
    results = [decoder.generate("hi", max_new_tokens=100, temperature=2.0, top_k=40, seed=seed) for seed in range(12)]
    ended = [result for result in results if result.finish_reason == "eos"]
    assert ended
    for result in ended:
        assert result.token_ids[-1] in decoder.base.eos_token_ids
        assert not set(result.token_ids[:-1]) & set(decoder.base.eos_token_ids)
        assert "<|im_end|>" not in result.text


def test_prompt_of_context_minus_one(decoder: Decoder) -> None:
    result = decoder.generate([5] * (CONTEXT - 1), max_new_tokens=9)
    assert len(result.token_ids) == 1
    assert result.finish_reason in {"context", "eos"}


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([5] * CONTEXT, {}, f"has {CONTEXT} tokens.*at most {CONTEXT}"),
        ([], {}, "no tokens"),
        ([5, 64], {}, "token id 64, outside this base's 0…63"),
        ("hi", {"draft_length": 4}, "--draft-length is 4.*trained for 3"),
        ("hi", {"max_new_tokens": 0}, "--max-new-tokens is 0"),
        ("hi", {"temperature": -1.0}, "--temperature"),
        ("hi", {"stop": [""]}, "--stop"),
    ],
)
def test_bad_requests_are_refused_before_the_first_piece(
    decoder: Decoder, prompt: str | list[int], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        decoder.stream(prompt, **settings)  # type: ignore[arg-type]


# ---- log-probabilities -------------------------------------------------------------------------------------------

SAMPLED = {"temperature": 1.0, "seed": 3}
LOGPROB_WAYS: dict[str, dict[str, object]] = {
    "plain": {"draft_length": 0},
    "greedy": {},
    "greedy tree": {"tree": "3,2,1"},
    "greedy dynamic tree": {"tree": "dynamic:9"},
    "plain, sampled": {**SAMPLED, "draft_length": 0},
    **{rule: {**SAMPLED, "verify": rule} for rule in ("block", "token", "match", "lossy-typical")},
    "tree, block": {**SAMPLED, "tree": "3,2,1"},
    "tree, token": {**SAMPLED, "tree": "3,2,1", "verify": "token"},
    "keyed": {**SAMPLED, "reproducible": True},
    "lookup": {"lookup": 5},
    "lookup, sampled": {"temperature": 0.2, "seed": 3, "lookup": 5},
    "keyed tree": {**SAMPLED, "reproducible": True, "tree": "dynamic:9"},
    "state": {**SAMPLED, "processors": [lambda text, logits: -logits]},
    "processed": {"temperature": 0.5, "seed": 3, "top_k": 5, "repetition_penalty": 2.0, "logit_bias": {7: 5.0}},
    "processed tree": {"tree": "2,2,1", "repetition_penalty": 2.0, "suppress_tokens": [3, 4, 5, 6]},
}


@pytest.fixture(scope="module")
def exact() -> Decoder:
    """In float64, where another number of rows in a product costs 1e-15."""
    base = exact_base("llama")
    torch.manual_seed(0)
    heads = new_heads(HeadsOptions(draft_length=3), base).double()
    return Decoder(base, heads.bind(base.embedding, base.output_matrix))


@pytest.mark.parametrize("way", LOGPROB_WAYS)
def test_logprobs_are_those_of_the_base_before_any_processor(exact: Decoder, way: str) -> None:
    """Teacher-forced: one forward over the whole text, log_softmax of the raw logits at the committed tokens."""
    prompt = list(exact.base.tokenizer("the user")["input_ids"])
    stream = exact.stream(prompt, max_new_tokens=32, ignore_eos=True, logprobs=True, **LOGPROB_WAYS[way])
    pieces = list(stream)
    result = stream.result
    assert result.logprobs is not None
    hidden = exact.base.forward(torch.tensor([prompt + result.token_ids])).hidden[0, len(prompt) - 1 : -1]
    rows = exact.base.logits(hidden).log_softmax(dim=-1)
    expected = rows.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0].tolist()
    assert len(result.logprobs) == len(result.token_ids) == 32
    assert result.logprobs == pytest.approx(expected, abs=1e-10)
    assert [one for piece in pieces for one in piece.logprobs] == result.logprobs
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert result.stats.undrafted_texts == (way == "state")


@pytest.mark.parametrize("options", [{}, {**SAMPLED, "reproducible": True}], ids=["greedy", "keyed"])
def test_logprobs_are_those_of_plain_decoding(exact: Decoder, options: dict[str, object]) -> None:
    """Where the text is the same by construction."""
    settings = {"max_new_tokens": 32, "logprobs": True, **options}
    plain = exact.generate("the user", draft_length=0, **settings)
    for change in ({}, {"draft_length": 1}, {"tree": "3,2,1"}, {"tree": "dynamic:9"}):
        result = exact.generate("the user", **settings, **change)
        assert result.token_ids == plain.token_ids
        assert result.logprobs == pytest.approx(plain.logprobs, abs=1e-10)
        assert result.stats.drafted > 0


def test_logprobs_are_left_out_unless_asked_for(decoder: Decoder) -> None:
    stream = decoder.stream("hi", max_new_tokens=5)
    assert [piece.logprobs for piece in stream] == [()] * stream.stats.steps
    assert stream.result.logprobs is None


# ---- models ------------------------------------------------------------------------------------------------------


def test_plain_decoding_needs_no_heads(folder: Path, decoder: Decoder) -> None:
    plain = Decoder.from_pretrained(None, str(folder / "llama-0"), device="cpu")
    expected = decoder.generate("hi", max_new_tokens=10, draft_length=0)
    assert plain.generate("hi", max_new_tokens=10).token_ids == expected.token_ids
    with pytest.raises(UserError, match="neither --heads nor --base"):
        Decoder.from_pretrained(None)


def test_heads_of_another_base_are_refused(folder: Path, tmp_path: Path) -> None:
    heads = load_heads(folder / "heads")
    tiny_base("llama", tmp_path, seed=1)
    with pytest.raises(UserError, match="other weights.*use the base they name") as error:
        Decoder.from_pretrained(folder / "heads", str(tmp_path / "llama-1"), device="cpu")
    assert "\n" not in str(error.value)

    base = FrozenBase.from_pretrained(str(folder / "llama-0"), device="cpu")
    base.tokenizer.chat_template += " "
    with pytest.raises(UserError, match="another tokenizer or chat template"):
        Decoder(base, heads)

    config = replace(heads.config, vocab_size=128, base=BaseRef(name="elsewhere"))
    with pytest.raises(UserError, match="vocabulary size 128 instead of 64"):
        Decoder(base, build_heads(config))


@pytest.mark.parametrize("settings", [{"draft_length": 0}, {}, {"temperature": 1.0, "seed": 3}], ids=str)
def test_texts_decoded_in_turn_do_not_disturb_each_other(decoder: Decoder, settings: dict[str, float]) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12]]
    request = Request(max_new_tokens=20, ignore_eos=True, **settings)  # type: ignore[arg-type]
    alone = [decoder.generate(prompt, request).token_ids for prompt in prompts]
    streams = [decoder.stream(prompt, request) for prompt in prompts]
    together: list[list[int]] = [[], []]
    for pieces in zip_longest(*streams):
        for ids, piece in zip(together, pieces, strict=True):
            ids.extend(piece.token_ids if piece else ())
    assert together == alone

    def meanwhile(_: Sequence[int]) -> bool:
        decoder.generate(prompts[1], max_new_tokens=3)
        return False

    assert decoder.generate(prompts[0], replace(request, stop_when=meanwhile)).token_ids == alone[0]
