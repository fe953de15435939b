"""What decoding gives back: the pieces of a text as they come, and the finished text.

Knows: how steps become text, and what is told of it. Refuses to know: where steps come from.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from decode.engine import Step
from decode.stats import DecodeStats
from decode.stopping import FinishReason
from decode.text import TextStream


@dataclass(frozen=True)
class Piece:
    """What one step adds. `text` may be empty while a character is incomplete or when the tokens are special ones."""

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per token: an accepted draft, or (False) the recovered or bonus token."""
    logprobs: tuple[float, ...] = ()
    """Per token, if asked for: see `Result`."""
    rejected: tuple[int, ...] = ()
    """The drafts in whose place the last token was recovered; none if it is the bonus token, or a draft."""


@dataclass(frozen=True)
class Result:
    """A finished text."""

    text: str
    """Generated text without special tokens; a stop string stays at its end."""
    token_ids: list[int]
    """Generated ids, including the end-of-sequence id if one ended the text."""
    finish_reason: FinishReason
    prompt_tokens: int
    stats: DecodeStats
    steps: list[Step] = field(default_factory=list)
    """What each step committed, and which drafts were rejected: where a text came fast, and why not elsewhere."""
    logprobs: list[float] | None = None
    """Per id, if `logprobs` is asked for: natural logarithm of the base's probability before temperature and any other
    processor; the same as plain decoding gives, to rounding."""


class Stream:
    """Iterates over the pieces of one text; `result` is there once the last piece was taken."""

    def __init__(self, steps: Iterator[Step], to_pieces: TextStream, prompt_tokens: int, stats: DecodeStats) -> None:
        self._steps = steps
        self._to_pieces = to_pieces
        self._prompt_tokens = prompt_tokens
        self._texts: list[str] = []
        self._done: list[Step] = []
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []
        self._result: Result | None = None
        self.stats = stats

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        return self.add(next(self._steps))

    def add(self, step: Step) -> Piece:
        """Take in a step that came another way than by iterating."""
        text = self._to_pieces.push(step.tokens, final=step.finish_reason is not None)
        self._texts.append(text)
        self._done.append(step)
        self._token_ids.extend(step.tokens)
        self._logprobs.extend(step.logprobs)
        if step.finish_reason:
            whole, logprobs = "".join(self._texts), self._logprobs or None
            counts = self._prompt_tokens, self.stats
            self._result = Result(whole, self._token_ids, step.finish_reason, *counts, self._done, logprobs)
        return Piece(text, step.tokens, step.drafted, step.logprobs, step.rejected)

    @property
    def text(self) -> str:
        """What there is so far."""
        return "".join(self._texts)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None while it has not."""
        return None if self._result is None else self._result.finish_reason

    @property
    def result(self) -> Result:
        assert self._result is not None, "take all pieces first"
        return self._result
