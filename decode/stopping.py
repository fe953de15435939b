"""When a text ends: end-of-sequence ids, stop ids and strings, the caller, the length limit, the context; in order.

Knows: committed tokens and how to turn ids into text. Refuses to know which of them were drafted: a block of tokens
ends exactly where plain decoding would have ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from mtp.errors import UserError, ask_user

FinishReason = Literal["eos", "stop", "callback", "length", "context"]
ToText = Callable[[Sequence[int]], str]
StopWhen = Callable[[Sequence[int]], bool]
"""Given all committed ids, the newest last: whether the text ends here."""

# Tokens beyond the bytes of the longest stop string, so that a window that starts mid-character is harmless.
_WINDOW_MARGIN = 4


@dataclass(frozen=True)
class Limit:
    """How many tokens may be committed, and the reason to give when they have been."""

    tokens: int
    reason: FinishReason


def room(prompt_length: int, context_length: int, max_new_tokens: int) -> Limit:
    """The limit for a prompt; UserError when nothing fits."""
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {max_new_tokens}; use at least 1.")
    if prompt_length < 1:
        raise UserError("the prompt has no tokens; give at least one, or leave out --no-chat to use the chat template.")
    left = context_length - prompt_length
    if left < 1:
        raise UserError(
            f"the prompt has {prompt_length} tokens, but this base reads at most {context_length} including the "
            "answer; shorten the prompt."
        )
    return Limit(max_new_tokens, "length") if max_new_tokens <= left else Limit(left, "context")


class Stopping:
    """Cuts blocks of committed tokens. One object per text; feed it every block in order.

    A token that ends the text belongs to it (as in transformers' `generate`), whether it is an end-of-sequence id, a
    stop id, or completes a stop string. Stop strings are looked for in the text including special tokens, generated
    part only. `stop_when` is asked after every token, in order, also inside a block.
    """

    def __init__(
        self,
        limit: Limit,
        eos_token_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        to_text: ToText | None = None,
        *,
        stop_ids: Sequence[int] = (),
        stop_when: StopWhen | None = None,
    ) -> None:
        if any(not text for text in stop):
            raise UserError("--stop is an empty string; give some text, or leave the option out.")
        assert to_text is not None or not stop, "stop strings need a tokenizer"
        self._limit = limit
        self._eos = frozenset(eos_token_ids)
        self._stop_ids = frozenset(stop_ids)
        self._stop_when = stop_when
        self._stop = tuple(stop)
        self._to_text = to_text
        # A token of a stop string holds at least one of its bytes, so this many tokens always contain all of it.
        self._window = max((len(text.encode()) for text in stop), default=0) + _WINDOW_MARGIN
        self._tokens: list[int] = []

    @property
    def remaining(self) -> int:
        """How many tokens may still be committed."""
        return self._limit.tokens - len(self._tokens)

    def cut(self, block: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many tokens of `block` belong to the text, and why it ends there (None: it goes on)."""
        seen = len(self._tokens)
        self._tokens.extend(block)
        for count, token in enumerate(block, start=1):
            reason = self._reason(token, seen + count)
            if reason:
                del self._tokens[seen + count :]
                return count, reason
        return len(block), None

    def _reason(self, token: int, length: int) -> FinishReason | None:
        if token in self._eos:
            return "eos"
        if token in self._stop_ids or (self._stop and self._completes_stop(length)):
            return "stop"
        asked = self._stop_when
        if asked is not None and ask_user("function stop_when", asked, self._tokens[:length]):
            return "callback"
        return self._limit.reason if length >= self._limit.tokens else None

    def _completes_stop(self, length: int) -> bool:
        """Earlier tokens were looked at before, so any match in the window was completed by the last one."""
        assert self._to_text is not None
        text = self._to_text(self._tokens[max(0, length - self._window) : length])
        return any(stop in text for stop in self._stop)
