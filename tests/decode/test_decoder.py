"""`Decoder` on a small real base with saved heads: texts, seeds, settings and refusals."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode import Decoder
from mtp.base import FrozenBase
from mtp.config import BaseRef, HeadsOptions
from mtp.errors import UserError
from mtp.heads import build_heads
from mtp.hub import load_heads, save_heads
from mtp.initialise import new_heads
from tests.tiny import CONTEXT, tiny_base

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
    assert decoder.engine.check_draft_length(None) == 3


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


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 1.5), ("top_k", 1), ("top_p", 0.01), ("min_p", 1.0), ("draft_length", 1)]
)
def test_every_setting_has_an_effect(decoder: Decoder, name: str, value: float) -> None:
    settings = {"max_new_tokens": 30, "temperature": 1.0, "seed": 1}
    plain = decoder.generate("hi", **settings)  # type: ignore[arg-type]
    changed = decoder.generate("hi", **(settings | {name: value}))  # type: ignore[arg-type]
    assert plain.token_ids != changed.token_ids
    if name in {"top_k", "top_p", "min_p"}:  # so strict that only the likeliest token is left
        greedy = decoder.generate("hi", max_new_tokens=30)
        assert changed.token_ids == greedy.token_ids
        assert (changed.stats.rule, greedy.stats.rule) == ("token", "greedy")


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
