"""From logits to probabilities and from probabilities to tokens, for the base and for the heads alike.

Knows: every setting of a request that shapes its distribution, the part of them that needs nothing but one row of
logits (temperature and truncations), and a seeded source of random numbers that tests can replace. Refuses to know
which of the two models a row came from, and the text before it (`mtp.processors` does): the distribution a draft is
drawn from and the one it is judged by must take the same road, or decoding stops being exact.

Shapes: B batch, K draft position, V vocabulary; `...` is any leading shape.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.generation.logits_process import EpsilonLogitsWarper, EtaLogitsWarper, TypicalLogitsWarper

from mtp.errors import UserError

Processor = Callable[[Tensor, Tensor], Tensor]
"""From text [R, n] and its next logits [R, V] to new logits [R, V]; the interface of transformers' LogitsProcessor."""

_TOP_P_CANDIDATES = 1024
_LEAST, _MOST = 1e-30, 1e30  # what float32 can divide by and compare with; 1 / 1e-30 is below 1e30
_SMALL_TEMPERATURE = 1e-2  # above it, logits can be divided as they are
_SMALLEST_UNIFORM = 2.0**-54  # below every other value of a 53-bit uniform; keeps the interval open at zero

_T = TypeVar("_T")


def option(default: _T, help: str, *, python_only: bool = False) -> _T:
    """A dataclass field with its help text in `metadata["help"]`, where the command line finds it.

    `python_only` marks what cannot be written on a command line, in `metadata["python_only"]`.
    """
    metadata: dict[str, Any] = {"help": help} | ({"python_only": True} if python_only else {})
    if isinstance(default, dict):
        # A dict has no hash; equal configs still have equal hashes without it.
        return cast(_T, field(default_factory=default.copy, metadata=metadata, hash=False))
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What is done to logits before a token is drawn; the defaults are greedy decoding.

    At temperature 0 the truncations (top-k to eta cutoff) have no effect; the settings listed after them do act.
    """

    temperature: float = option(0.0, "divides the logits; 0 is greedy: the likeliest token always")
    top_k: int = option(0, "keep the k likeliest tokens, and ties with the last of them; 0 is off")
    top_p: float = option(1.0, "keep the smallest set of likeliest tokens whose mass reaches this; 1 is off")
    min_p: float = option(0.0, "keep tokens at least this likely relative to the likeliest; 0 is off")
    typical_p: float = option(
        1.0, "keep the tokens whose surprise is nearest to the entropy, up to this mass; 1 is off"
    )
    epsilon_cutoff: float = option(0.0, "drop tokens less likely than this; 0 is off")
    eta_cutoff: float = option(
        0.0, "drop tokens less likely than this, or than its root times exp(-entropy) if that is less; 0 is off"
    )
    repetition_penalty: float = option(
        1.0,
        "makes tokens of the prompt and of the text so far less likely (above 1) or likelier (below 1); 1 is off",
    )
    presence_penalty: float = option(0.0, "subtracted from the logit of every generated token; 0 is off")
    frequency_penalty: float = option(
        0.0, "subtracted from the logit of a token once for each time it was generated; 0 is off"
    )
    no_repeat_ngram: int = option(0, "no n tokens in a row occur twice, prompt included; 0 is off")
    bad_words_ids: tuple[tuple[int, ...], ...] = option(
        (), "token sequences that never appear; the end-of-text id by itself does not count, as in transformers"
    )
    suppress_tokens: tuple[int, ...] = option((), "token ids that never appear")
    min_new_tokens: int = option(0, "no end of text before so many new tokens; 0 is off")
    logit_bias: dict[int, float] = option({}, "added to the logits of these token ids")
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = option(
        None,
        "called with 0 and the text so far [n]; returns the ids that may follow, and must return the same again "
        "for the same text",
        python_only=True,
    )
    processors: tuple[Processor, ...] = option(
        (), "your own logits processors, applied after all penalties and before the temperature", python_only=True
    )

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise UserError when a value is out of range."""
        self._check_truncations()
        self._check_penalties()
        self.check_ids()

    def check_ids(self, vocab_size: int | None = None) -> None:
        """Raise UserError when a token id is negative or, if V is known, beyond the vocabulary."""
        named = {
            "suppress-tokens": self.suppress_tokens,
            "bad-words": [token for word in self.bad_words_ids for token in word],
            "logit-bias": self.logit_bias,
        }
        limit, allowed = (math.inf, "up") if vocab_size is None else (vocab_size, f"to {vocab_size - 1}")
        for name, tokens in named.items():
            for token in tokens:
                _require(
                    0 <= token < limit, name, f"given token id {token}", f"ids of the vocabulary, from 0 {allowed}"
                )

    def _check_truncations(self) -> None:
        temperature, cutoff = self.temperature, "a number from 0 (off) to below 1"
        _require(
            temperature == 0 or _LEAST <= temperature <= _MOST,
            "temperature",
            temperature,
            f"0 (greedy) or a positive number, {_LEAST:g} to {_MOST:g}",
        )
        _require(self.top_k >= 0, "top-k", self.top_k, "0 (off) or a positive number of tokens")
        _require(_LEAST <= self.top_p <= 1, "top-p", self.top_p, "a number above 0 and at most 1 (off)")
        _require(0 <= self.min_p <= 1, "min-p", self.min_p, "a number from 0 (off) to 1")
        _require(0 < self.typical_p <= 1, "typical-p", self.typical_p, "a number above 0 and at most 1 (off)")
        _require(0 <= self.epsilon_cutoff < 1, "epsilon-cutoff", self.epsilon_cutoff, cutoff)
        _require(0 <= self.eta_cutoff < 1, "eta-cutoff", self.eta_cutoff, cutoff)

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        _require(math.isfinite(penalty) and penalty > 0, "repetition-penalty", penalty, "a positive number; 1 is off")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _require(math.isfinite(value), f"{name}-penalty", value, "a finite number; 0 is off")
        _require(self.no_repeat_ngram >= 0, "no-repeat-ngram", self.no_repeat_ngram, "0 (off) or a number of tokens")
        _require(self.min_new_tokens >= 0, "min-new-tokens", self.min_new_tokens, "0 (off) or a number of tokens")
        _require(all(self.bad_words_ids), "bad-words", "given an empty sequence", "sequences of at least one token id")
        for token, bias in self.logit_bias.items():
            _require(bias < math.inf, "logit-bias", f"{bias} for token id {token}", "finite numbers, or -inf to forbid")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise UserError(f"--{name} is {value}; use {remedy}.")


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows of `logits` [..., V] are a distribution: no NaN, no +inf, at least one token possible. Bool [...]."""
    return logits.amax(dim=-1).isfinite()  # amax carries NaN through, and is -inf only if the whole row is


def to_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Probabilities [..., V] of `logits` [..., V] in float32, or in float64 if the logits are.

    Temperature, then top-k, top-p, min-p, typical-p, epsilon and eta cutoff, which is the order of transformers.
    Temperature 0 gives a one-hot row on the first maximum. Rows for which `finite_rows` is false come out undefined;
    every other row has mass.
    """
    if sampling.greedy:
        return _one_hot_max(logits)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.min_p > 0 or sampling.temperature < _SMALL_TEMPERATURE:
        # Subtracting the maximum first keeps a tiny temperature from overflowing, and serves min-p.
        scores = (scores - scores.amax(dim=-1, keepdim=True)).div_(sampling.temperature)
    elif sampling.temperature != 1:
        scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = _keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores = _keep_top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        # The maximum is 0, so the relative probability of a token is exp(score).
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -math.inf)
    return _keep_by_entropy(scores, sampling).softmax(dim=-1)


def _one_hot_max(logits: Tensor) -> Tensor:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    probs = torch.zeros_like(logits, dtype=dtype)
    return probs.scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)


def _keep_top_k(scores: Tensor, k: int) -> Tensor:
    threshold = scores.topk(k, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < threshold, -math.inf)


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    """A token stays when the mass before it, in falling order, is below `top_p`; so the first always stays."""
    mass, vocab = scores.softmax(dim=-1), scores.shape[-1]
    for width in (min(_TOP_P_CANDIDATES, vocab), vocab):
        ordered, index = mass.topk(width, dim=-1)
        before = ordered.cumsum(dim=-1) - ordered
        # Once the last candidate falls, all tokens behind it do: sorting the whole vocabulary is rarely needed.
        if width == vocab or bool((before[..., -1] >= top_p).all()):
            break
    keep = torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, index, before < top_p)
    return scores.masked_fill(~keep, -math.inf)


def _keep_by_entropy(scores: Tensor, sampling: SamplingConfig) -> Tensor:
    """Typical-p, epsilon and eta cutoff by transformers' own classes, which take rows [R, V]; each leaves a token."""
    warpers: list[Any] = []
    if sampling.typical_p < 1:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    if sampling.epsilon_cutoff > 0:
        warpers.append(EpsilonLogitsWarper(sampling.epsilon_cutoff))
    if sampling.eta_cutoff > 0:
        warpers.append(EtaLogitsWarper(sampling.eta_cutoff, device=scores.device))
    if not warpers:
        return scores
    # A row that is no distribution would make the eta cutoff raise.
    rows = scores.masked_fill(~finite_rows(scores)[..., None], 0.0).reshape(-1, scores.shape[-1])
    for warper in warpers:
        rows = warper(None, rows)
    return rows.view_as(scores)


def check_seed(seed: int) -> None:
    """UserError unless every random source can be seeded with it."""
    if not 0 <= seed < 2**63:
        raise UserError(f"--seed is {seed}; use a whole number from 0 to 2**63 - 1.")


class RandomSource:
    """Seeded random draws. They are made on the CPU, so that a seed means the same on every device.

    Acceptance rules and the engine call only `bernoulli` and `categorical`; a test can override these two and visit
    every outcome.
    """

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            check_seed(seed)
            self._generator.manual_seed(seed)
        self._device = torch.device(device)

    def seek(self, *positions: int) -> None:
        """Say which absolute position of each text comes next. Only draws that are keyed by it care (`mtp.keyed`)."""

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """float64 numbers of `shape` in the open interval (0, 1)."""
        draws = torch.rand(tuple(shape), generator=self._generator, dtype=torch.float64)
        return draws.clamp_(min=_SMALLEST_UNIFORM).to(self._device)

    def bernoulli(self, prob: Tensor) -> Tensor:
        """True with probability `prob` [...]; strict, so that 0 is never true and 1 always is. NaN is false."""
        return self.uniform(prob.shape).to(prob.device) < prob

    def categorical(self, probs: Tensor) -> Tensor:
        """Token ids [...] drawn in proportion to `probs` [..., V] (inverse distribution function, float64).

        Never a token of probability 0, as long as a row has any mass; a row without mass gives 0.
        """
        cdf = probs.double().cumsum(dim=-1)
        if probs.device.type == "cpu":
            # One after the other, the sum does not move where nothing is added, so its first value above the threshold
            # is that of a possible token. The threshold is below the total, as the uniform is below 1.
            total = cdf[..., -1:]
            found = torch.searchsorted(cdf, self.uniform(total.shape) * total, right=True)
            return found.masked_fill_(~(total > 0), 0).squeeze(-1)
        # A parallel sum can rise by rounding where nothing is added; an impossible token must not profit.
        cdf = cdf.masked_fill(~(probs > 0), 0.0)
        total = cdf.amax(dim=-1, keepdim=True)
        return (cdf > self.uniform(total.shape).to(probs.device) * total).to(torch.uint8).argmax(dim=-1)
