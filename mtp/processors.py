"""The settings of a request that look at the text so far: penalties, bans, constraints, and the user's own processors.

Knows: transformers' logits processors, the order `generate` applies them in, and where the prompt of a text ends.
Refuses to know which of the two models a row came from, what is committed and what is a draft, and temperature and
truncations (`mtp.sampling`), which come after. A row may come out with every token masked: `finite_rows` is then false.

Shapes: R rows, n tokens of text, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation import logits_process as stock

from mtp.errors import UserError, ask_user
from mtp.sampling import Processor, SamplingConfig

STATELESS: tuple[type, ...] = (
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.ExponentialDecayLengthPenalty,
    stock.ForcedBOSTokenLogitsProcessor,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.MinPLogitsWarper,
    stock.NoBadWordsLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.SuppressTokensAtBeginLogitsProcessor,
    stock.SuppressTokensLogitsProcessor,
    stock.TemperatureLogitsWarper,
    stock.TopHLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.WatermarkLogitsProcessor,
)
"""Classes of transformers whose result is a function of text and logits, row by row, whatever they were asked before.

PrefixConstrainedLogitsProcessor is not among them: it tells the user's function which row it is in.
"""


class TextProcessors:
    """What one request does to logits in view of its text; built once per text.

    A processor that keeps state is only right if it sees the committed text, one call for each committed token, as
    under `generate`. Drafts would show it texts that never come to be, and show others twice. So where `stateful` is
    true, decode without drafts.
    """

    active: bool
    """False: nothing looks at the text, and a call returns the logits as they are."""
    stateful: bool
    """True: a processor of the user's may keep state, which is assumed of everything but instances of `STATELESS`
    (subclasses may have added state) and objects with an attribute `stateless = True`."""

    def __init__(
        self,
        sampling: SamplingConfig,
        prompt_length: int,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device | str,
    ) -> None:
        """UserError for a token id outside the vocabulary, and for one thing asked for in two ways."""
        sampling.check_ids(vocab_size)
        eos = list(eos_token_ids)
        # The order is that of `generate`; the count penalties, which it lacks, follow their sibling.
        self._chain: list[Processor] = [
            *_bias_and_penalties(sampling, prompt_length),
            *_bans(sampling, eos),
            *_constraints(sampling, prompt_length, eos, vocab_size, device),
        ]
        self._own = tuple(sampling.processors)
        _refuse_twice(self._chain, self._own)
        self._vocab_size = vocab_size
        self.active = bool(self._chain or self._own)
        self.stateful = not all(_is_stateless(processor) for processor in self._own)

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        """New logits [R, V] for the tokens that follow `text` [R, n], in float32, or in float64 if `logits` [R, V] are.

        `text` is prompt, committed tokens and drafts so far; all rows belong to one request. The arguments stay as
        they are. A processor of the user's that returns anything but [R, V] is a UserError.
        """
        assert logits.shape == (len(text), self._vocab_size), (logits.shape, text.shape, self._vocab_size)
        scores = logits if logits.dtype == torch.float64 else logits.float()
        for processor in self._chain:
            scores = processor(text, scores)
        for processor in self._own:
            scores = _apply_own(processor, text, scores)
        return scores


def _bias_and_penalties(sampling: SamplingConfig, prompt_length: int) -> list[Processor]:
    chain: list[Processor] = []
    if sampling.logit_bias:
        bias = {(token,): float(value) for token, value in sampling.logit_bias.items()}
        chain.append(stock.SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty != 1:
        chain.append(stock.RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.presence_penalty or sampling.frequency_penalty:
        chain.append(_CountPenalties(sampling.presence_penalty, sampling.frequency_penalty, prompt_length))
    return chain


def _bans(sampling: SamplingConfig, eos: list[int]) -> list[Processor]:
    chain: list[Processor] = []
    if sampling.no_repeat_ngram:
        chain.append(stock.NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram))
    # The stock class skips the end of text as a word too, but does not survive having no word left.
    words = [list(word) for word in sampling.bad_words_ids if list(word) not in [[token] for token in eos]]
    if words:
        chain.append(stock.NoBadWordsLogitsProcessor(words))
    return chain


def _constraints(
    sampling: SamplingConfig, prompt_length: int, eos: list[int], vocab_size: int, device: torch.device | str
) -> list[Processor]:
    chain: list[Processor] = []
    if sampling.min_new_tokens and eos:
        chain.append(
            stock.MinNewTokensLengthLogitsProcessor(prompt_length, sampling.min_new_tokens, eos, device=device)
        )
    if sampling.prefix_allowed_tokens_fn is not None:
        chain.append(_PrefixConstraint(sampling.prefix_allowed_tokens_fn, vocab_size))
    if sampling.suppress_tokens:
        chain.append(stock.SuppressTokensLogitsProcessor(sampling.suppress_tokens, device=device))
    return chain


def _refuse_twice(chain: Sequence[Processor], own: Sequence[Processor]) -> None:
    """`generate` lets the user's object replace the option of the same class; which of the two is meant, we ask."""
    taken = {type(processor) for processor in chain}
    for processor in own:
        if type(processor) in taken:
            raise UserError(
                f"processors holds a {type(processor).__name__}, but an option asks for the same; use one of the two."
            )


def _is_stateless(processor: Processor) -> bool:
    return type(processor) in STATELESS or getattr(processor, "stateless", False) is True


def _apply_own(processor: Processor, text: Tensor, scores: Tensor) -> Tensor:
    # Users may write into what they are given.
    result = ask_user("logits processor", processor, text.clone(), scores.clone())
    if not isinstance(result, Tensor) or result.shape != scores.shape:
        got = f"shape {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        name = getattr(
            processor, "__name__", type(processor).__name__
        )  # a class's own name tells nothing of a function
        raise UserError(f"the logits processor {name} returned {got}; return the logits, shape {list(scores.shape)}.")
    return result.to(scores.dtype)


class _CountPenalties:
    """Presence and frequency penalty: of a token generated c times, frequency · c + presence is subtracted if c > 0."""

    def __init__(self, presence: float, frequency: float, prompt_length: int) -> None:
        self._presence = presence
        self._frequency = frequency
        self._prompt_length = prompt_length

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        generated = text[:, self._prompt_length :]
        counts = torch.zeros_like(logits).scatter_add_(1, generated, torch.ones_like(generated, dtype=logits.dtype))
        return logits - self._frequency * counts - self._presence * (counts > 0).to(logits.dtype)


class _PrefixConstraint:
    """Only what the user's function allows after a text may follow it.

    The stock class takes rows for texts and numbers them; here all are of one text, number 0. It also raises where
    nothing is allowed, but that may be after a draft which is going to be rejected: such a row is masked instead.
    """

    def __init__(self, function: Callable[[int, Tensor], list[int]], vocab_size: int) -> None:
        self._function = function
        self._vocab_size = vocab_size

    def __call__(self, text: Tensor, logits: Tensor) -> Tensor:
        allowed = [self._allowed(row) for row in text]
        constraint = stock.PrefixConstrainedLogitsProcessor(lambda row, _: allowed[row] or [0], num_beams=1)
        impossible = torch.tensor([not tokens for tokens in allowed], device=logits.device)
        scores: Tensor = constraint(text, logits)
        return scores.masked_fill(impossible[:, None], -math.inf)

    def _allowed(self, text: Tensor) -> list[int]:
        # Users may write into what they are given.
        tokens = list(ask_user("function prefix_allowed_tokens_fn", self._function, 0, text.clone()))
        ends = (min(tokens), max(tokens)) if tokens else ()
        wrong = [token for token in ends if not 0 <= token < self._vocab_size]
        if wrong:
            raise UserError(
                f"prefix_allowed_tokens_fn returned token id {wrong[0]}; return ids from 0 to {self._vocab_size - 1}."
            )
        return tokens
