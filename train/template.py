"""Rendering and tokenising conversations so that the place of every answer is known.

Knows: chat templates (their `{% generation %}` marks, or else what rendering one more turn adds) and ids.
Refuses to know: what is supervised in the end, batches, files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import jinja2

from mtp.errors import UserError
from train.records import Message, Record

Tokenizer = Any  # transformers' tokenizers share no typed base
Span = tuple[int, int]

MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

NO_ANSWER = "no assistant turn after a prompt"
EMPTY = "an empty turn"
REFUSED = "refused by the chat template"
CHANGED = "the chat template changes the answer"


@dataclass(frozen=True)
class Encoded:
    """Ids of one sequence, the token spans of the answers in it, and what each span says ("" if unknown)."""

    ids: list[int]
    spans: list[Span]
    said: tuple[str, ...]


@dataclass(frozen=True)
class Unusable:
    """Stands for a record that cannot be used, with the reason under which it is counted."""

    reason: str


@dataclass(frozen=True)
class _Rendered:
    """Text with the character spans of the answers, and the ids that belong before and after its tokens."""

    text: str
    spans: tuple[Span, ...]
    said: tuple[str, ...]
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def encode_turns(records: Sequence[Record], tokenizer: Tokenizer) -> list[list[Encoded] | Unusable]:
    """For each record its sequences, usually one, or why it cannot be used. All texts go through one tokenizer call.

    Raises UserError for what no other record would do better: a chat without a chat template, or a template that does
    not continue its own generation prompt.
    """
    rendered = [_render(record, tokenizer) for record in records]
    texts = [item for items in rendered if isinstance(items, list) for item in items if isinstance(item, _Rendered)]
    encoded = iter(_encode(texts, tokenizer))
    return [
        items
        if isinstance(items, Unusable)
        else [item if isinstance(item, Encoded) else next(encoded) for item in items]
        for items in rendered
    ]


def plain_ids(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Ids without anything added. Long texts are expected, so the tokenizer's warning about length is kept quiet."""
    if not texts:
        return []
    out = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = out["input_ids"]
    return ids


def leading_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a text by itself, such as a begin-of-sequence token."""
    bare, full = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    count = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return tuple(full[:count])


def decode(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text with special tokens written out and blanks left as they are."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _render(record: Record, tokenizer: Tokenizer) -> Sequence[_Rendered | Encoded] | Unusable:
    try:
        if record.kind == "text":
            return _render_text(record, tokenizer)
        return _check_turns(record) or _render_chat(record, tokenizer)
    except jinja2.TemplateError:
        return Unusable(REFUSED)


def _check_turns(record: Record) -> Unusable | None:
    if all(m["role"] != "assistant" for m in record.messages):
        return Unusable(NO_ANSWER)
    spoken = [m["content"] for m in record.messages if m["role"] in ("user", "assistant")]
    return None if all(text.strip() for text in spoken) else Unusable(EMPTY)


def _render_text(record: Record, tokenizer: Tokenizer) -> list[_Rendered] | Unusable:
    if not record.text.strip():
        return Unusable(EMPTY)
    return [_Rendered(record.text, ((0, len(record.text)),), ("",), before=leading_ids(tokenizer))]


def _render_chat(record: Record, tokenizer: Tokenizer) -> Sequence[_Rendered | Encoded] | Unusable:
    if tokenizer.chat_template and tokenizer.is_fast and MARKS.search(tokenizer.get_chat_template()):
        return [_encode_marked(record, tokenizer)]
    if tokenizer.chat_template:
        return _render_turns(record, tokenizer)
    if record.kind == "completion":
        return [_render_completion(record, tokenizer)]
    remedy = "Use records with prompt and response, or with text, or a base with a chat template."
    raise UserError(f"{record.where} is a chat, and the tokenizer of the base has no chat template. {remedy}")


def _render_completion(record: Record, tokenizer: Tokenizer) -> _Rendered:
    """Without a template: the prompt and the answer as they are, between what begins and what ends a sequence."""
    prompt, answer = (message["content"] for message in record.messages)
    after = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    span = (len(prompt), len(prompt) + len(answer))
    return _Rendered(prompt + answer, (span,), (answer,), leading_ids(tokenizer), after)


def _encode_marked(record: Record, tokenizer: Tokenizer) -> Encoded:
    """The mask that transformers computes from the template's own `{% generation %}` marks."""
    messages = list(record.messages)
    out = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    spans, start = [], 0
    for on, group in groupby(out["assistant_masks"]):
        end = start + len(list(group))
        spans += [(start, end)] if on else []
        start = end
    if spans == [(0, start)]:
        raise UserError(
            f"{record.where}: the chat template marks every token as an answer; correct its generation marks."
        )
    answers = tuple(m["content"] for m in messages if m["role"] == "assistant")
    return Encoded(list(out["input_ids"]), spans, answers if len(answers) == len(spans) else ("",) * len(spans))


def _render_turns(record: Record, tokenizer: Tokenizer) -> list[_Rendered] | Unusable:
    """An answer is what the text of the conversation gains over the text of its prompt when the answer is added.

    Answers share one sequence as long as the template only appends. Some templates rewrite earlier turns (they take out
    thinking, or end the conversation with a token of their own); then a new sequence begins, as it would in decoding.
    """
    sequences: list[_Rendered] = []
    for i, message in enumerate(record.messages):
        if message["role"] != "assistant" or not i:  # an answer to nothing (ShareGPT has them) is context only
            continue
        prompt = _template(tokenizer, record.messages[:i], prompt=True)
        text = _template(tokenizer, record.messages[: i + 1], prompt=False)
        if not prompt or not text.startswith(prompt):
            remedy = "Use a tokenizer whose template has {% generation %} marks."
            raise UserError(f"{record.where}: the chat template does not continue its own generation prompt. {remedy}")
        if message["content"].strip() not in text[len(prompt) :]:
            return Unusable(CHANGED)
        earlier = sequences.pop() if sequences and prompt.startswith(sequences[-1].text) else _Rendered("", (), ())
        span, said = (len(prompt), len(text)), message["content"]
        sequences.append(_Rendered(text, (*earlier.spans, span), (*earlier.said, said)))
    return sequences or Unusable(NO_ANSWER)


def _template(tokenizer: Tokenizer, messages: Sequence[Message], *, prompt: bool) -> str:
    if not messages:
        return ""
    text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    return text


def _encode(items: Sequence[_Rendered], tokenizer: Tokenizer) -> list[Encoded]:
    """Tokens of the texts, with character spans turned into token spans."""
    texts: list[str] = []
    for item in items:
        texts += [item.text, *(item.text[:cut] for cut in _cuts(item))]
    ids = iter(plain_ids(tokenizer, texts))
    encoded = []
    for item in items:
        tokens, places = _align(item, next(ids), [next(ids) for _ in _cuts(item)], tokenizer)
        shift = len(item.before)
        spans = [(places[start] + shift, places[end] + shift) for start, end in item.spans]
        spans[-1] = (spans[-1][0], spans[-1][1] + len(item.after))
        encoded.append(Encoded([*item.before, *tokens, *item.after], spans, item.said))
    return encoded


def _cuts(item: _Rendered) -> list[int]:
    return sorted({cut for span in item.spans for cut in span} - {0, len(item.text)})


def _align(
    item: _Rendered, whole: list[int], heads: Sequence[list[int]], tokenizer: Tokenizer
) -> tuple[list[int], dict[int, int]]:
    """Tokens of the text, and the token index of every cut.

    A cut lies between two tokens when the tokens of the text before it begin the tokens of the whole. Where a token
    would straddle a cut, the pieces are tokenised one by one. That is how decoding sees them: the prompt is a piece.
    """
    bounds = [0, *_cuts(item), len(item.text)]
    if all(whole[: len(head)] == head for head in heads):
        return whole, dict(zip(bounds, [0, *map(len, heads), len(whole)], strict=True))
    tokens: list[int] = []
    places = {0: 0}
    pieces = plain_ids(tokenizer, [item.text[a:b] for a, b in pairwise(bounds)])
    for bound, piece in zip(bounds[1:], pieces, strict=True):
        tokens += piece
        places[bound] = len(tokens)
    return tokens, places
