"""Prompts into token ids, token ids into text that can be shown piece by piece.

Knows: tokenizers and chat templates. Refuses to know models. A piece never ends inside a character: what is still
incomplete waits for the next token.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from decode.stopping import ToText
from mtp.errors import UserError

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
"""A user's text, a conversation (role and content), or token ids that are used as they are."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what tokenizers show for bytes that are not a whole character


def encode(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt. With `chat`, text becomes a user message in the chat template if the tokenizer has one."""
    if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
        return [int(item) for item in prompt]  # type: ignore[arg-type]
    if tokenizer is None:
        raise UserError("this base has no tokenizer; give token ids as the prompt.")
    for text in _texts_of(prompt):
        check_text(text, "the prompt")
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str) and not (chat and has_template):
        return list(tokenizer(prompt)["input_ids"])
    if not (chat and has_template):
        why = "the tokenizer has no chat template" if chat else "--no-chat is set"
        raise UserError(f"the prompt is a list of messages, but {why}; give the prompt as one text.")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return _apply_template(tokenizer, messages)


def _texts_of(value: Any) -> Iterator[str]:
    """All texts of a prompt, wherever they are in its messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_of(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts_of(item)


def check_text(text: str, what: str) -> None:
    """UserError unless it can be written as UTF-8: a command line in another encoding and JSON can hold what cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} has a part that is no text (at character {error.start + 1}); give UTF-8.") from None


def _apply_template(tokenizer: Any, messages: Sequence[Any]) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs of the base's authors and raise what they like
        raise UserError(f"the base's chat template refuses these messages ({error}); give roles it knows.") from error
    # The template writes its own beginning-of-sequence mark; tokenizers that add one would double it.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_text(tokenizer: Any, *, special: bool) -> ToText:
    """Ids to text, with or without special tokens, and never touched up."""

    def to_text(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(
            list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    return to_text


class TextStream:
    """Turns a growing list of ids into pieces of text whose concatenation is the text of all ids.

    Each call decodes a short window: the ids of the last shown piece, which give the new ones their left context, and
    the ids that are not shown yet.
    """

    def __init__(self, to_text: ToText) -> None:
        self._to_text = to_text
        self._shown: list[int] = []
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int], final: bool = False) -> str:
        """The text that these ids complete; `final` gives out what is left, complete or not."""
        self._waiting.extend(token_ids)
        before = self._to_text(self._shown)
        after = self._to_text([*self._shown, *self._waiting])
        if not final and (after.endswith(_INCOMPLETE) or len(after) <= len(before)):
            return ""
        if after != before:
            self._shown, self._waiting = self._waiting, []
        return after[len(before) :]
