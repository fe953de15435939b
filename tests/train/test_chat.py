"""The mask: what is supervised decodes to the assistant's text and the end of its turn, and to nothing else."""

from itertools import groupby
from typing import Any

import pytest
import torch

from decode.text import encode as encode_prompt
from mtp.base import FrozenBase
from mtp.errors import UserError
from tests.tiny import tiny_tokenizer
from train import chat
from train.chat import LOST, NO_PROMPT, NOTHING, Example, encode_records, show
from train.records import Record, normalise
from train.template import CHANGED, EMPTY, NO_ANSWER, REFUSED

END = "<|im_end|>"
TWO_TURNS = [
    {"role": "system", "content": "be brief."},
    {"role": "user", "content": "what is a user?"},
    {"role": "assistant", "content": "the one in the inn."},
    {"role": "user", "content": "and then?"},
    {"role": "assistant", "content": "an ant."},
]
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED_TEXT_ONLY = MARKED.replace(
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}",
    "{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
)
REWRITING = (  # ends the conversation with a token of its own, so that a later turn does not continue the text
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)


def with_template(template: str | None) -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def record(row: dict | list, where: str = "d:1") -> Record:
    return normalise({"messages": row} if isinstance(row, list) else row, where)


def encode(row: dict | list, tokenizer: Any, max_length: int = 512) -> Example:
    examples, _ = encode_records([record(row)], tokenizer, max_length=max_length)
    assert len(examples) == 1
    return examples[0]


def spans(example: Example, tokenizer: Any) -> list[str]:
    pairs = zip(example.supervised.tolist(), example.tokens.tolist(), strict=True)
    return [tokenizer.decode([t for _, t in group]) for on, group in groupby(pairs, lambda p: p[0]) if on]


@pytest.mark.parametrize("template", [tiny_tokenizer().chat_template, MARKED, MARKED_TEXT_ONLY])
def test_every_assistant_turn_and_its_end_are_supervised_and_nothing_else(template: str) -> None:
    tokenizer = with_template(template)
    example = encode(TWO_TURNS, tokenizer)
    assert spans(example, tokenizer) == ["the one in the inn." + END, "an ant." + END]
    assert example.tokens.tolist() == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    assert example.tokens.dtype == torch.int32
    assert example.supervised.dtype == torch.bool


def test_the_prompt_is_what_decoding_feeds_to_the_base() -> None:
    tokenizer = tiny_tokenizer()
    example = encode(TWO_TURNS[:3], tokenizer)
    first = int(example.supervised.nonzero()[0])
    assert example.tokens[:first].tolist() == encode_prompt(tokenizer, TWO_TURNS[:2], chat=True)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_mask_is_noticed(shift: int) -> None:
    """Negative control: the very comparison above fails for a mask that is one token off."""
    tokenizer = tiny_tokenizer()
    example = encode(TWO_TURNS, tokenizer)
    moved = Example(example.tokens, example.supervised.roll(shift), example.where)
    assert spans(moved, tokenizer) != spans(example, tokenizer)


@pytest.mark.parametrize("shift", [1, -4])
def test_spans_that_miss_the_answer_are_refused(shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check inside `encode_records` catches a span that starts late, or ends early by more than the end of turn."""
    found = chat.encode_turns

    def moved(records: Any, tokenizer: Any) -> Any:
        turns = found(records, tokenizer)
        for item in (item for items in turns for item in items):
            item.spans[:] = [(a + max(shift, 0), b + min(shift, 0)) for a, b in item.spans]
        return turns

    monkeypatch.setattr(chat, "encode_turns", moved)
    with pytest.raises(UserError, match=LOST):
        encode(TWO_TURNS, tiny_tokenizer())


def test_a_template_that_rewrites_history_gives_one_sequence_per_answer() -> None:
    tokenizer = with_template(REWRITING)
    examples, report = encode_records([record(TWO_TURNS)], tokenizer, max_length=512)
    assert [spans(e, tokenizer) for e in examples] == [["the one in the inn." + END], ["an ant." + END]]
    assert (report.records, report.kept, report.examples) == (1, 1, 2)


def test_templates_without_a_usable_generation_prompt_are_refused() -> None:
    template = tiny_tokenizer().chat_template
    with pytest.raises(UserError, match=r"d:1: the chat template does not continue its own generation prompt"):
        encode(TWO_TURNS, with_template(template.replace("<|im_start|>assistant", "<|im_start|>bot")))
    with pytest.raises(UserError, match="does not continue"):
        encode(TWO_TURNS[1:3], with_template("{{ messages[1]['content'] if messages|length > 1 else '' }}"))
    with pytest.raises(UserError, match="marks every token"):
        encode(TWO_TURNS, with_template("{% generation %}{{ messages[2]['content'] }}{% endgeneration %}"))


def test_a_token_across_the_border_is_split_as_in_decoding() -> None:
    """The template ends in `t`, the answer begins with `h`, and the tokenizer has a token `th`."""
    template = "{% for m in messages %}{{ m['role'][0] + 't' + m['content'] }}{% endfor %}"
    tokenizer = with_template(template + "{% if add_generation_prompt %}{{ 'at' }}{% endif %}")
    messages = [{"role": "user", "content": "so. "}, {"role": "assistant", "content": "he is"}]
    example = encode(messages, tokenizer)
    assert spans(example, tokenizer) == ["he is"]
    whole = tokenizer("utso. athe is")["input_ids"]
    assert example.tokens.tolist() != whole
    assert (
        example.tokens.tolist() == encode_prompt(tokenizer, messages[:1], chat=True) + tokenizer("he is")["input_ids"]
    )


def test_an_answer_cut_at_the_limit_teaches_no_end_of_turn() -> None:
    tokenizer = tiny_tokenizer()
    example = encode({"messages": TWO_TURNS, "finish_reason": "length"}, tokenizer)
    assert spans(example, tokenizer) == ["the one in the inn." + END, "an ant."]
    assert bool(example.supervised[-1])


def test_plain_text_supervises_all_but_the_first_token() -> None:
    example = encode({"text": "the inn is the ant."}, tiny_tokenizer())
    assert example.supervised.tolist() == [False] + [True] * (len(example) - 1)


def with_bos(tokenizer: Any) -> Any:
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))]
    )
    return tokenizer


def test_one_begin_of_sequence_token_and_never_two() -> None:
    tokenizer = with_bos(tiny_tokenizer())
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer("an ant")["input_ids"][0] == bos
    chat_ids = encode(TWO_TURNS, tokenizer).tokens.tolist()
    assert chat_ids[0] == bos
    assert chat_ids[1] != bos
    text = encode({"text": "an ant"}, tokenizer)
    assert text.tokens.tolist() == tokenizer("an ant")["input_ids"]
    assert text.supervised.tolist() == [False] + [True] * (len(text) - 1)


@pytest.mark.parametrize("bos", [False, True])
def test_prompt_and_response_without_a_template_are_joined(bos: bool) -> None:
    tokenizer = with_template(None)
    tokenizer = with_bos(tokenizer) if bos else tokenizer
    example = encode({"prompt": "what is it? ", "response": "an ant."}, tokenizer)
    assert spans(example, tokenizer) == ["an ant." + END]
    first = int(example.supervised.nonzero()[0])
    assert example.tokens[:first].tolist() == encode_prompt(tokenizer, "what is it? ", chat=True)
    with pytest.raises(UserError, match="d:1 is a chat, and the tokenizer of the base has no chat template"):
        encode(TWO_TURNS, tokenizer)


def test_prompt_and_response_with_a_template_are_a_chat() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "an ant."}]
    a, b = encode({"prompt": "what?", "response": "an ant."}, tokenizer), encode(messages, tokenizer)
    assert a.tokens.equal(b.tokens)
    assert a.supervised.equal(b.supervised)


def test_what_is_too_long_is_cut_and_counted_without_losing_a_target() -> None:
    tokenizer = tiny_tokenizer()
    full = encode(TWO_TURNS, tokenizer)
    records = [record(TWO_TURNS, "d:1"), record({"text": "an ant"}, "d:2"), record(TWO_TURNS[3:], "d:3")]
    examples, report = encode_records(records, tokenizer, max_length=40)
    assert (report.whole, report.kept, report.records) == (2, 3, 3)
    assert (report.cut, report.sliced) == (0, 1)
    assert max(map(len, examples)) == 40
    assert report.examples == len(examples)
    said = [spans(e, tokenizer) for e in examples if e.where == "d:1"]
    assert "".join(text for window in said for text in window) == "the one in the inn." + END + "an ant." + END
    assert sum(int(e.supervised.sum()) for e in examples if e.where == "d:1") == int(full.supervised.sum())


def test_the_left_of_a_long_prompt_goes() -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "user", "content": "what is the inn? " * 20}, {"role": "assistant", "content": "an ant."}]
    full = encode(messages, tokenizer)
    examples, report = encode_records([record(messages)], tokenizer, max_length=50)
    assert (report.whole, report.cut, report.sliced) == (0, 1, 0)
    assert examples[0].tokens.equal(full.tokens[-50:])
    assert spans(examples[0], tokenizer) == ["an ant." + END]


def test_a_mask_of_ones_on_a_chat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chat.encode_turns

    def all_marked(records: Any, tokenizer: Any) -> Any:
        turns = found(records, tokenizer)
        for item in (item for items in turns for item in items):
            item.spans[:] = [(0, len(item.ids))]
        return turns

    monkeypatch.setattr(chat, "encode_turns", all_marked)
    with pytest.raises(UserError, match=NO_PROMPT):
        encode(TWO_TURNS[1:3], tiny_tokenizer())
    assert len(encode({"text": "an ant"}, tiny_tokenizer())) > 1  # a text is supervised whole


def test_an_answer_before_any_prompt_is_context_only() -> None:
    tokenizer = tiny_tokenizer()
    example = encode([TWO_TURNS[2], *TWO_TURNS[3:]], tokenizer)
    assert spans(example, tokenizer) == ["an ant." + END]
    assert tokenizer.decode(example.tokens).startswith("<|im_start|>assistant\nthe one in the inn.")
    with pytest.raises(UserError, match=NO_ANSWER):
        encode([TWO_TURNS[2]], tokenizer)


def test_a_text_of_one_token_has_no_target() -> None:
    _, report = encode_records(
        [record({"text": "a"}, "d:1"), record({"text": "an ant"})], tiny_tokenizer(), max_length=9
    )
    assert (report.dropped, report.first_dropped) == ({NOTHING: 1}, {NOTHING: "d:1"})


def test_unusable_records_are_counted_with_their_reason_and_the_rest_is_kept() -> None:
    strict = tiny_tokenizer().chat_template + "{% if messages|length > 4 %}{{ raise_exception('too many') }}{% endif %}"
    rewriting = strict.replace("message['content']", "message['content'] | replace('secret', '')")
    records = [
        record(TWO_TURNS[1:3], "d:1"),
        record(TWO_TURNS[1:2], "d:2"),
        record([TWO_TURNS[1], {"role": "assistant", "content": " \n"}], "d:3"),
        record(TWO_TURNS, "d:4"),
        record([TWO_TURNS[1], {"role": "assistant", "content": "a secret ant"}], "d:5"),
        record({"text": " "}, "d:6"),
    ]
    examples, report = encode_records(records, with_template(rewriting), max_length=512)
    assert [e.where for e in examples] == ["d:1"]
    assert report.dropped == {NO_ANSWER: 1, EMPTY: 2, REFUSED: 1, CHANGED: 1}
    assert report.first_dropped[EMPTY] == "d:3"
    assert (report.records, report.kept) == (6, 1)
    assert (report.tokens, report.supervised_tokens) == (len(examples[0]), int(examples[0].supervised.sum()))
    assert "1 of 6 records kept" in report.summary()
    assert f"2 dropped: {EMPTY} (first: d:3)" in report.summary()


def test_nothing_supervised_at_all_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"none of 1 records can be trained on \(no assistant turn after a prompt: 1 \(first: d:1\)"
    ):
        encode(TWO_TURNS[:2], tiny_tokenizer())
    with pytest.raises(UserError, match="data.max_length is 1; allowed is 2 or more"):
        encode(TWO_TURNS, tiny_tokenizer(), max_length=1)


def test_show_marks_exactly_the_supervised_text() -> None:
    tokenizer = tiny_tokenizer()
    shown = show(encode(TWO_TURNS, tokenizer), tokenizer)
    assert "<|im_start|>assistant\n⟦the one in the inn.<|im_end|>⟧\n<|im_start|>user" in shown
    assert shown.replace("⟦", "").replace("⟧", "") == tokenizer.apply_chat_template(TWO_TURNS, tokenize=False)


def test_many_records_keep_their_order_and_report_progress() -> None:
    rows = [record({"text": "an ant " * (i % 7 + 1)}, f"d:{i}") for i in range(chat.CHUNK + 10)]
    seen: list[tuple[int, int]] = []
    examples, _ = encode_records(rows, tiny_tokenizer(), max_length=64, on_progress=lambda a, b: seen.append((a, b)))
    assert [e.where for e in examples] == [r.where for r in rows]
    assert seen == [(chat.CHUNK, len(rows)), (len(rows), len(rows))]


@pytest.mark.parametrize(
    "answer",
    [
        "Paris.",
        " leading blank",
        "\n\nTwo lines\n\nand more.\n",
        "naïve — 数学 🙂",
        "```python\nprint('x')\n```",
        "a<|im_end|>b",
    ],
)
def test_the_real_template(smollm2: FrozenBase, answer: str) -> None:
    tokenizer = smollm2.tokenizer
    messages = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": answer}]
    example = encode(messages, tokenizer)
    marked = tokenizer.decode(example.tokens[example.supervised], clean_up_tokenization_spaces=False)
    assert marked == answer + END
    first = int(example.supervised.nonzero()[0])
    assert example.tokens[:first].tolist() == encode_prompt(tokenizer, messages[:1], chat=True)
    assert tokenizer.decode(example.tokens).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    assert tokenizer.decode(example.tokens).count("<|im_start|>system") == 1
