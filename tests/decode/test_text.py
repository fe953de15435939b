"""Prompts, pieces, stop strings and prompt files, without a model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.prompts import read_prompts
from decode.stopping import Limit, Stopping
from decode.text import TextStream, encode, plain_text
from mtp.errors import UserError
from tests.tiny import tiny_tokenizer


def from_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(token_ids).decode(errors="replace")


# ---- pieces ------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_pieces_hold_whole_characters_and_add_up(text: str, cuts: list[int]) -> None:
    ids = list(text.encode())
    stream, pieces, start, turn = TextStream(from_bytes), [], 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)]
        pieces.append(stream.push(ids[start : start + size], final=start + size >= len(ids)))
        start, turn = start + size, turn + 1
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_emoji_comes_out_in_one_piece() -> None:
    ids = list("a👩‍🚀b".encode())
    stream = TextStream(from_bytes)
    pieces = [stream.push([token]) for token in ids] + [stream.push([], final=True)]
    assert [piece for piece in pieces if piece] == ["a", "👩", "\u200d", "🚀", "b"]


def test_an_incomplete_end_is_given_out_at_last() -> None:
    ids = list("é".encode())[:1]
    stream = TextStream(from_bytes)
    assert stream.push(ids) == ""
    assert stream.push([], final=True) == "\ufffd"


# ---- stop strings ------------------------------------------------------------------------------------------------


def cut(text: str, blocks: Sequence[int], stop: Sequence[str], limit: int = 1_000) -> tuple[str, str | None]:
    """Feed the bytes of `text` in blocks of these sizes; what is kept and why it ends."""
    stopping = Stopping(Limit(limit, "length"), (), stop, from_bytes)
    ids, kept, reason, turn = list(text.encode()), [], None, 0
    while ids and reason is None:
        size = blocks[turn % len(blocks)]
        block, ids = ids[:size], ids[size:]
        count, reason = stopping.cut(block)
        kept += block[:count]
        turn += 1
    return from_bytes(kept), reason


@pytest.mark.parametrize("blocks", [[1], [2], [3], [4], [7], [100]])
def test_a_stop_string_that_spans_tokens_ends_text_and_ids_together(blocks: list[int]) -> None:
    assert cut("one. two. END three END", blocks, ["END"]) == ("one. two. END", "stop")
    assert cut("one. two. END three", blocks, ["xyz", "two. E"]) == ("one. two. E", "stop")
    assert cut("naïve 世界 end", blocks, ["世界"]) == ("naïve 世界", "stop")
    assert cut("no stop here", blocks, ["END"]) == ("no stop here", None)
    assert cut("one. two. END", blocks, ["END"], limit=4) == ("one.", "length")


@settings(deadline=None)
@given(
    text=st.text("ab", max_size=40),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=2),
    blocks=st.lists(st.integers(1, 6), min_size=1, max_size=5),
)
def test_blocks_end_where_single_tokens_end(text: str, stop: list[str], blocks: list[int]) -> None:
    assert cut(text, blocks, stop) == cut(text, [1], stop)
    ends = [text.index(one) + len(one) for one in stop if one in text]
    assert cut(text, [1], stop)[0] == (text[: min(ends)] if ends else text)


def test_end_of_sequence_wins_over_the_limit() -> None:
    stopping = Stopping(Limit(2, "length"), eos_token_ids=(7,))
    assert stopping.cut([5, 7]) == (2, "eos")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="--stop is an empty string"):
        Stopping(Limit(2, "length"), stop=["a", ""], to_text=from_bytes)


# ---- prompts -----------------------------------------------------------------------------------------------------


def test_text_is_put_into_the_chat_template_once() -> None:
    tokenizer = tiny_tokenizer()
    ids = encode(tokenizer, "hi", chat=True)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert encode(tokenizer, [{"role": "user", "content": "hi"}], chat=True) == ids
    assert encode(tokenizer, ids, chat=True) == ids
    assert tokenizer.decode(encode(tokenizer, "hi", chat=False)) == "hi"


class Doubling:
    """A tokenizer that adds a beginning-of-sequence id 1 unless told not to."""

    chat_template = "template"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(character) for character in text]}

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: bool) -> str:
        return "\x01" + messages[-1]["content"]


def test_no_second_beginning_of_sequence_after_the_template() -> None:
    assert encode(Doubling(), "a", chat=True) == [1, ord("a")]
    assert encode(Doubling(), "a", chat=False) == [1, ord("a")]


def test_messages_need_a_template() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(UserError, match="--no-chat is set"):
        encode(tiny_tokenizer(), messages, chat=False)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        encode(tokenizer, messages, chat=True)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        encode(tokenizer, messages, chat=True)


def test_special_tokens_in_text() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer("hi<|im_end|>")["input_ids"]
    assert plain_text(tokenizer, special=False)(ids) == "hi"
    assert plain_text(tokenizer, special=True)(ids) == "hi<|im_end|>"


# ---- prompt files ------------------------------------------------------------------------------------------------


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


MESSAGES = [{"role": "system", "content": ""}, {"role": "user", "content": "c"}]


def test_the_three_forms_of_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, "", {"turns": ["b", "later"]}, {"messages": MESSAGES, "id": 3})
    assert read_prompts(path) == ["a", "b", MESSAGES]
    assert read_prompts(path, limit=2) == ["a", "b"]


@pytest.mark.parametrize(
    "bad",
    ["{", "[1]", "3", {"text": "a"}, {"prompt": ""}, {"prompt": 3}, {"turns": []}, {"turns": [1]}, {"messages": [{}]}],
)
def test_a_bad_line_is_named(tmp_path: Path, bad: object) -> None:
    path = write(tmp_path, {"prompt": "a"}, "", bad)
    with pytest.raises(UserError, match=r"prompts\.jsonl, line 3"):
        read_prompts(path)


def test_files_without_prompts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no prompts"):
        read_prompts(write(tmp_path, "", " "))
    with pytest.raises(UserError, match="is not a file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="--limit is 0"):
        read_prompts(write(tmp_path, {"prompt": "a"}), limit=0)


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match="line 2"):
        read_prompts(path)


def test_what_is_no_text_is_refused_wherever_it_stands_in_a_conversation() -> None:
    for prompt in (
        "bad \ud800 x",
        [{"role": "user", "content": "bad \ud800 x"}],
        [{"role": "a\udcff", "content": "x"}],
    ):
        with pytest.raises(UserError, match="the prompt has a part that is no text"):
            encode(object(), prompt, chat=True)
    with pytest.raises(UserError, match="no chat template"):  # a good one gets as far as the tokenizer
        encode(object(), [{"role": "user", "content": "good \U0001f600"}], chat=True)
