"""A conversation with a base: what was said, and whether there is room for more.

Knows: roles, and that every turn is read anew as the base's chat template has it. Refuses to know terminals.
"""

from collections.abc import Sequence

from decode.decoder import Decoder
from decode.request import Request
from decode.stream import Stream
from decode.text import encode
from mtp.errors import UserError


class ContextFull(UserError):
    """The base cannot read the conversation and answer."""


class Conversation:
    """Turns of a user and of the base. UserError for a base without a chat template, and for messages it refuses."""

    def __init__(self, decoder: Decoder, request: Request, system: str | None = None) -> None:
        base = decoder.base
        if not getattr(base.tokenizer, "chat_template", None):
            raise UserError(
                f"base {base.name!r} has no chat template, so it was not made to talk; use mtp-decode generate, or an "
                "instruct base."
            )
        self._decoder, self._request = decoder, request
        self._begin = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, str]] = list(self._begin)
        encode(base.tokenizer, [*self._begin, {"role": "user", "content": "Hello"}], chat=True)

    @property
    def tokens(self) -> int:
        """How many tokens the base has to read so far."""
        return len(encode(self._decoder.base.tokenizer, self.messages, chat=True)) if self.messages else 0

    @property
    def turns(self) -> int:
        """How many answers there are."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def ask(self, text: str) -> Stream:
        """The answer as it is decoded; nothing is kept before `keep`. Raises ContextFull where there is no room."""
        asked: Sequence[dict[str, str]] = [*self.messages, {"role": "user", "content": text}]
        count, most = len(encode(self._decoder.base.tokenizer, asked, chat=True)), self._decoder.base.context_length
        if count >= most:
            raise ContextFull(f"the conversation would have {count} tokens, and this base reads at most {most}.")
        return self._decoder.stream(asked, self._request)

    def keep(self, text: str, answer: str) -> None:
        """A turn that is over, whole or stopped."""
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Begin anew."""
        self.messages = list(self._begin)
