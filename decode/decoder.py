"""Decoding as a Python call: `Decoder`, and what it gives back.

Knows: how base, heads, tokenizer and engine fit together, and which pairs to refuse. Refuses to know argv and
terminals.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from decode.drafters import HeadsDrafter
from decode.engine import Engine, Step, effective_rule
from decode.stats import DecodeStats
from decode.stopping import FinishReason, Stopping, room
from decode.target import BaseTarget
from decode.text import Prompt, TextStream, check_text, encode, plain_text
from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from mtp.heads import Heads
from mtp.hub import load_heads
from mtp.sampling import RandomSource, SamplingConfig


def _silent(message: str) -> None:
    pass


@dataclass(frozen=True)
class Piece:
    """What one step adds. `text` may be empty while a character is incomplete or when the tokens are special ones."""

    text: str
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """Per token: an accepted draft, or (False) the recovered or bonus token."""


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


class Stream:
    """Iterates over the pieces of one text; `result` is there once the last piece was taken."""

    def __init__(self, steps: Iterator[Step], to_pieces: TextStream, prompt_tokens: int, stats: DecodeStats) -> None:
        self._steps = steps
        self._to_pieces = to_pieces
        self._prompt_tokens = prompt_tokens
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._result: Result | None = None
        self.stats = stats

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        step = next(self._steps)
        text = self._to_pieces.push(step.tokens, final=step.finish_reason is not None)
        self._texts.append(text)
        self._token_ids.extend(step.tokens)
        if step.finish_reason:
            whole = "".join(self._texts)
            self._result = Result(whole, self._token_ids, step.finish_reason, self._prompt_tokens, self.stats)
        return Piece(text, step.tokens, step.drafted)

    @property
    def result(self) -> Result:
        assert self._result is not None, "take all pieces first"
        return self._result


class Decoder:
    """A base and, unless it is to decode plainly, the heads that draft for it."""

    def __init__(self, base: FrozenBase, heads: Heads | None = None) -> None:
        """The heads must be on the base's device and bound to it. Heads of another base are a UserError."""
        if heads is not None:
            check_pair(base, heads)
        self.base = base
        self.heads = heads
        self.engine = Engine(BaseTarget(base), HeadsDrafter(heads) if heads is not None else None)

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path | None,
        base: str | None = None,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        trust_remote_code: bool = False,
        home: Path | None = None,
        on_progress: Callable[[str], None] = _silent,
    ) -> "Decoder":
        """Load heads from a folder, and the base that their config names unless `base` names another copy of it.

        `heads` None decodes plainly and needs `base`. `home` is where embedded bases are kept (default: MTP_HOME, or
        the user's cache); `on_progress` hears what is fetched. Raises UserError when either cannot be loaded or they do
        not belong together.
        """
        if heads is None and base is None:
            raise UserError("neither --heads nor --base is given; name at least one of them.")
        loaded = None if heads is None else load_heads(Path(heads))
        if loaded is not None and base is None:
            base, revision = loaded.config.base.name, revision or loaded.config.base.revision
        assert base is not None
        frozen = FrozenBase.from_pretrained(
            base,
            revision=revision,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            home=default_home(os.environ) if home is None else home,
            on_progress=on_progress,
        )
        if loaded is not None:
            check_pair(frozen, loaded)
            loaded.to(device=frozen.device, dtype=frozen.dtype).eval()
            loaded.bind(frozen.embedding, frozen.output_matrix)
        return cls(frozen, loaded)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        draft_length: int | None = None,
        stop: Sequence[str] = (),
        chat: bool = True,
    ) -> Result:
        """Decode one text to its end; see `stream` for the arguments."""
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        stream = self.open(
            prompt, sampling, max_new_tokens=max_new_tokens, seed=seed, draft_length=draft_length, stop=stop, chat=chat
        )
        for _ in stream:
            pass
        return stream.result

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
        draft_length: int | None = None,
        stop: Sequence[str] = (),
        chat: bool = True,
    ) -> Stream:
        """Decode one text piece by piece.

        Args:
            prompt: a user's text, a list of messages (role, content), or token ids that are used as they are.
            max_new_tokens: most tokens to generate; the base's context may end the text earlier.
            temperature: 0 is greedy; above 0 drafts are judged by the token rule.
            top_k: keep the k likeliest tokens; 0 is off.
            top_p: keep the likeliest tokens up to this mass; 1 is off.
            min_p: keep tokens at least this likely relative to the likeliest; 0 is off.
            seed: makes the draws repeatable on the same machine and versions; None draws a new one.
            draft_length: K; None is all the heads were trained for, 0 decodes plainly.
            stop: texts that end the generation; they stay at the end of the text.
            chat: put text into the base's chat template, if it has one.

        Returns an iterator of `Piece` whose `result` is complete after the last piece. Concatenated piece texts are
        `result.text`. Raises UserError before the first piece on settings that cannot be met.
        """
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        return self.open(
            prompt, sampling, max_new_tokens=max_new_tokens, seed=seed, draft_length=draft_length, stop=stop, chat=chat
        )

    def open(
        self,
        prompt: Prompt,
        sampling: SamplingConfig,
        *,
        max_new_tokens: int = 128,
        seed: int | None = None,
        draft_length: int | None = None,
        stop: Sequence[str] = (),
        chat: bool = True,
    ) -> Stream:
        """`stream` with the sampling settings in one object."""
        ids = encode(self.base.tokenizer, prompt, chat)
        for text in stop:
            check_text(text, "--stop")
        self._check_ids(ids)
        stats = DecodeStats(effective_rule(sampling), self.engine.check_draft_length(draft_length))
        tokenizer = self.base.tokenizer
        to_text = plain_text(tokenizer, special=False) if tokenizer is not None else _no_text
        whole_text = plain_text(tokenizer, special=True) if tokenizer is not None else None
        if stop and whole_text is None:
            raise UserError("--stop needs a tokenizer, and this base has none; leave the option out.")
        limit = room(len(ids), self.engine.target.context_length, max_new_tokens)
        steps = self.engine.run(
            ids,
            sampling=sampling,
            stopping=Stopping(limit, self.base.eos_token_ids, tuple(stop), whole_text),
            random=RandomSource(seed, self.base.device),
            stats=stats,
        )
        return Stream(steps, TextStream(to_text), len(ids), stats)

    def _check_ids(self, ids: Sequence[int]) -> None:
        outside = [token for token in ids if not 0 <= token < self.base.vocab_size]
        if outside:
            raise UserError(
                f"the prompt has the token id {outside[0]}, outside this base's 0…{self.base.vocab_size - 1}; "
                "encode it with the base's own tokenizer."
            )


def _no_text(token_ids: Sequence[int]) -> str:
    return ""


def check_pair(base: FrozenBase, heads: Heads) -> None:
    """UserError unless these heads were trained on this base: sizes, weights and tokenizer."""
    config = heads.config
    for what, trained, found in (
        ("vocabulary size", config.vocab_size, base.vocab_size),
        ("hidden size", config.hidden_size, base.hidden_size),
    ):
        if trained != found:
            raise _mismatch(base, heads, f"{what} {trained} instead of {found}")
    if config.base.fingerprint and config.base.fingerprint != base.fingerprint():
        raise _mismatch(base, heads, "other weights")
    if (
        config.base.tokenizer_fingerprint
        and base.tokenizer is not None
        and config.base.tokenizer_fingerprint != base.tokenizer_fingerprint()
    ):
        raise _mismatch(base, heads, "another tokenizer or chat template")


def _mismatch(base: FrozenBase, heads: Heads, difference: str) -> UserError:
    return UserError(
        f"--heads were trained for a base with {difference} than --base {base.name}; use the base they name "
        f"({heads.config.base.name}, revision {heads.config.base.revision or 'none'}), or train heads for this one."
    )
