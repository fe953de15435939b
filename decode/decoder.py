"""Decoding as a Python call: `Decoder`, and what it gives back.

Knows: how base, heads, tokenizer and engine fit together, and which pairs to refuse. Refuses to know argv and
terminals.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.chain import Drafting
from decode.draft_length import CONTEXT, DraftLengths, StepCosts
from decode.drafters import HeadsDrafter
from decode.engine import Engine, run_alone
from decode.laws import Laws
from decode.many import check_batch, in_order, one_by_one, several_at_once
from decode.pair import check_pair
from decode.request import Request, make_request
from decode.shortage import explained
from decode.speed import Compile, check_compile, speed_up
from decode.stats import DecodeStats
from decode.step_costs import measure
from decode.stopping import Stopping, room
from decode.stream import Result, Stream
from decode.target import BaseTarget
from decode.text import Prompt, TextStream, check_text, encode, plain_text
from decode.together import Begin, batch_fault
from decode.tree_shape import TreeShape
from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.errors import UserError
from mtp.heads import Heads
from mtp.hub import find_heads, load_heads
from mtp.hub_access import HubAccess
from mtp.keyed import KeyedSource
from mtp.processors import TextProcessors
from mtp.quantise import check_quantise
from mtp.quantise import quantise as quantise_base
from mtp.sampling import RandomSource


def _silent(message: str) -> None:
    pass


class Decoder:
    """A base and, unless it is to decode plainly, the heads that draft for it."""

    def __init__(self, base: FrozenBase, heads: Heads | None = None, *, allow_other_base: bool = False) -> None:
        """The heads must be on the base's device and bound to it. Heads of another base are a UserError, unless
        `allow_other_base` and it is one of the same sizes."""
        if heads is not None:
            check_pair(base, heads, allow_other_base)
        self.base = base
        self.heads = heads
        self._lengths: dict[tuple[int, str | None], DraftLengths] = {}  # of `auto`: by batch size and tree

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
        compile: Compile = "auto",
        quantise: str | None = None,
        home: Path | None = None,
        on_progress: Callable[[str], None] = _silent,
        allow_other_base: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "Decoder":
        """Load heads from a folder, by name those that come with the package, or from the Hub (`owner/name` or
        `owner/name@revision`), and the base that their config names, at its revision, unless `base` names another copy.

        `heads` None decodes plainly and needs `base`. `compile` is for speed: see `decode.speed`. `quantise` rounds the
        weights of the base, which is another p then: see `mtp.quantise`. `home` is where
        embedded bases and compiled kernels are kept (default: MTP_HOME, or the user's cache); `on_progress` hears what
        is fetched. `revision` is the base's. `token`, `cache_dir`, `local_files_only`: for the Hub, as in transformers.
        Raises UserError when either cannot be loaded or they do not belong together. `allow_other_base` takes a base
        with other weights or another tokenizer than the heads were trained for: the text follows exactly the base that
        is given, and what falls is how many drafts it accepts.
        """
        if heads is None and base is None:
            raise UserError("neither --heads nor --base is given; name at least one of them.")
        check_compile(compile)
        check_quantise(quantise)
        access = HubAccess(token=token, cache_dir=cache_dir, local_files_only=local_files_only)
        loaded = None if heads is None else load_heads(find_heads(heads, access))
        if loaded is not None and base is None:
            base, revision = loaded.config.base.name, revision or loaded.config.base.revision
        assert base is not None
        home = default_home(os.environ) if home is None else home
        frozen = FrozenBase.from_pretrained(
            base,
            revision=revision,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            home=home,
            on_progress=on_progress,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
        )
        if loaded is not None:
            if told := check_pair(frozen, loaded, allow_other_base):
                on_progress(told)
            loaded.to(device=frozen.device, dtype=frozen.dtype).eval()
            loaded.bind(frozen.embedding, frozen.output_matrix)
        if quantise is not None:  # only now, as heads recognise their base by its weights
            quantise_base(frozen, quantise)
        speed_up(frozen, loaded, compile, home, on_progress)
        return cls(frozen, loaded, allow_other_base=allow_other_base)

    def generate(self, prompt: Prompt, request: Request | None = None, **options: Any) -> Result:
        """Decode one text to its end; see `stream`."""
        stream = self.stream(prompt, request, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, request: Request | None = None, **options: Any) -> Stream:
        """Decode one text piece by piece.

        Args:
            prompt: a user's text, a list of messages (role, content), or token ids that are used as they are.
            request: all settings in one object; greedy decoding when None.
            options: single settings by the names of `Request`, such as max_new_tokens=64, temperature=0.7, seed=1.

        Returns an iterator of `Piece` whose `result` is complete after the last piece. Concatenated piece texts are
        `result.text`. Raises UserError before the first piece on settings that cannot be met, an unknown name included.
        """
        return self._prepare(prompt, _with_options(request, options))[1]

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        request: Request | Sequence[Request] | None = None,
        *,
        batch_size: int = 8,
        **options: Any,
    ) -> Iterator[Result]:
        """Decode several texts, `batch_size` of them at a time; see `as_done`.

        Results come in the order of the prompts, each as soon as it and all before it are done. Raises the UserError of
        a text that cannot be decoded when its turn comes.
        """
        return in_order(self.as_done(prompts, request, batch_size=batch_size, **options))

    def as_done(
        self,
        prompts: Iterable[Prompt],
        request: Request | Sequence[Request] | None = None,
        *,
        batch_size: int = 8,
        **options: Any,
    ) -> Iterator[tuple[int, Result | UserError]]:
        """Decode several texts, `batch_size` of them at a time; each with the number of its prompt when it is done.

        A prompt takes the place of a text that is done. Every text is the one that `generate` gives, but for rounding:
        all of its settings are its own, its seed included. One that cannot be decoded has its UserError in place of a
        result; the others go on.

        Args:
            prompts, options: as for `stream`.
            request: settings for all prompts, or one for each.
            batch_size: texts that share the base's forwards; 1 decodes one after the other.

        Raises UserError before the first result on what no batch can do: trees, processors that keep state, and bases
        that cannot run over texts of different lengths.
        """
        asked = list(prompts)
        if request is None or isinstance(request, Request):
            requests = [_with_options(request, options)] * len(asked)
        else:
            requests = [_with_options(one, options) for one in request]
        if len(requests) != len(asked):
            raise UserError(f"there are {len(requests)} requests for {len(asked)} prompts; give one, or one for each.")
        check_batch(self.base, requests, batch_size, lambda: self._batch_fault)
        size = min(batch_size, len(asked))
        if size <= 1:
            return one_by_one(self._prepare, asked, requests)
        prepare = partial(self._prepare, batch_size=size)
        return explained(several_at_once(self.base, prepare, asked, requests, size), self.base)

    @cached_property
    def _batch_fault(self) -> str | None:
        return batch_fault(self.base)

    def _prepare(self, prompt: Prompt, request: Request, batch_size: int = 1) -> tuple[Begin, Stream]:
        """How to begin a text, and the stream of its steps if it is alone."""
        ids = encode(self.base.tokenizer, prompt, request.chat)
        self._check_ids(ids)
        request = self._with_bad_words(request)
        processors = self._processors(request, len(ids))
        stopping = self._stopping(request, len(ids))
        engine = self._engine(request, batch_size)
        stats = self._stats(engine, request, processors)
        begin = partial(
            engine.begin,
            ids,
            request=request,
            stopping=stopping,
            random=self._random(request),
            stats=stats,
            processors=processors,
        )
        tokenizer = self.base.tokenizer
        to_text = plain_text(tokenizer, special=False) if tokenizer is not None else _no_text
        return begin, Stream(explained(run_alone(begin), self.base), TextStream(to_text), len(ids), stats)

    def drafting(self, request: Request, committed: Tensor) -> Drafting:
        """What a step behind `committed` [n] has to draft with. Its drafter has not seen the text yet."""
        request = self._with_bad_words(request)
        drafter = None if self.heads is None else HeadsDrafter(self.heads)
        laws = Laws(request, self._processors(request, len(committed)), drafter.draft_ids if drafter else None)
        return Drafting(drafter, committed, laws, self.base.vocab_size, request, self._random(request))

    def _processors(self, request: Request, prompt_length: int) -> TextProcessors:
        eos, vocab_size = self.base.eos_token_ids, self.base.vocab_size
        return TextProcessors(request, prompt_length, eos, vocab_size, self.base.device)

    def _engine(self, request: Request, batch_size: int) -> Engine:
        """One per text: its cache and the heads' state are that text's own, so that several can be decoded in turn."""
        if self.heads is None:
            return Engine(BaseTarget(self.base))
        lengths = None
        if request.draft_length == "auto":
            kind = batch_size, request.tree
            if kind not in self._lengths:
                self._lengths[kind] = DraftLengths(self._step_costs(batch_size, request.tree))
            lengths = self._lengths[kind]
        return Engine(BaseTarget(self.base), HeadsDrafter(self.heads), lengths=lengths)

    def _step_costs(self, batch_size: int, tree: str | None) -> StepCosts:
        assert self.heads is not None
        most = self.heads.config.draft_length
        text = torch.arange(CONTEXT + 1 + most, device=self.base.device) % self.base.vocab_size
        request = Request(temperature=1.0, seed=0)
        again = partial(self.drafting, request, text[: CONTEXT + 1])
        return measure(self.base, again, text[CONTEXT + 1 :], batch_size, tree)

    def _with_bad_words(self, request: Request) -> Request:
        """The texts of --bad-words as ids, at the start of a word and inside one."""
        if not request.bad_words:
            return request
        tokenizer = self.base.tokenizer
        if tokenizer is None:
            raise UserError("--bad-words needs a tokenizer, and this base has none; give bad_words_ids.")
        found = dict.fromkeys(request.bad_words_ids)
        for word in request.bad_words:
            check_text(word, "--bad-words")
            for spelling in (word, f" {word.lstrip()}"):
                found[tuple(tokenizer(spelling, add_special_tokens=False)["input_ids"])] = None
        if () in found:
            raise UserError("--bad-words has an empty text; give some text, or leave the option out.")
        return replace(request, bad_words_ids=tuple(found), bad_words=())

    def _stopping(self, request: Request, prompt_length: int) -> Stopping:
        for text in request.stop:
            check_text(text, "--stop")
        outside = [token for token in request.stop_ids if token >= self.base.vocab_size]
        if outside:
            raise UserError(f"--stop-ids has {outside[0]}; use this base's token ids, 0 to {self.base.vocab_size - 1}.")
        tokenizer = self.base.tokenizer
        if request.stop and tokenizer is None:
            raise UserError("--stop needs a tokenizer, and this base has none; leave the option out.")
        return Stopping(
            room(prompt_length, self.base.context_length, request.max_new_tokens),
            () if request.ignore_eos else self.base.eos_token_ids,
            request.stop,
            plain_text(tokenizer, special=True) if tokenizer is not None else None,
            stop_ids=request.stop_ids,
            stop_when=request.stop_when,
        )

    def _stats(self, engine: Engine, request: Request, processors: TextProcessors) -> DecodeStats:
        """Counters for the K and lookup that will be used: none for a processor that may only see committed text."""
        draft_length = engine.check_draft_length(request.draft_length)
        if request.tree is not None:
            if draft_length == 0:
                raise UserError(f"--tree is {request.tree}, but there are no heads to draft with; name --heads.")
            self.base.require_trees()
            depth = TreeShape.parse(request.tree).depth or draft_length
            if depth > draft_length:
                raise UserError(
                    f"--tree is {request.tree}, {depth} levels deep, but K is {draft_length}; use at most as many."
                )
            draft_length = depth
        if processors.stateful and (draft_length or request.lookup):
            return DecodeStats(request.rule, 0, undrafted_texts=1)
        return DecodeStats(request.reported_rule, draft_length, request.tree, request.lookup)

    def _random(self, request: Request) -> RandomSource:
        if request.reproducible and request.seed is not None:
            return KeyedSource(request.seed, device=self.base.device)
        return RandomSource(request.seed, self.base.device)

    def _check_ids(self, ids: Sequence[int]) -> None:
        outside = [token for token in ids if not 0 <= token < self.base.vocab_size]
        if outside:
            raise UserError(
                f"the prompt has the token id {outside[0]}, outside this base's 0…{self.base.vocab_size - 1}; "
                "encode it with the base's own tokenizer."
            )


def _with_options(request: Request | None, options: Mapping[str, Any]) -> Request:
    """The request with single settings changed; UserError on an unknown name."""
    if not options:
        return request or Request()
    return make_request({**({} if request is None else vars(request)), **options})


def _no_text(token_ids: Sequence[int]) -> str:
    return ""
