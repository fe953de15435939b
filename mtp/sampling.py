"""From logits to probabilities and from probabilities to tokens, for the base and for the heads alike.

Knows: temperature, top-k, top-p, min-p, and a seeded source of random numbers that tests can replace. Refuses to know
which of the two models a row came from: the distribution a draft is drawn from and the one it is judged by must take
the same road, or decoding stops being exact.

Shapes: B batch, K draft position, V vocabulary; `...` is any leading shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtp.errors import UserError

_TOP_P_CANDIDATES = 1024
_SMALLEST_UNIFORM = 2.0**-54  # below every other value of a 53-bit uniform; keeps the interval open at zero


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """What is done to logits before a token is drawn; the defaults are greedy decoding."""

    temperature: float = 0.0
    """Divides the logits; 0 keeps only the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens (and ties with the last of them); 0 is off, more than V keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose mass reaches this; 1 is off."""
    min_p: float = 0.0
    """Keep tokens at least this likely relative to the likeliest; 0 is off."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise UserError when a value is out of range."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"--temperature is {self.temperature}; use 0 (greedy) or a positive number.")
        if self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k}; use 0 (off) or a positive number of tokens.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p}; use a number above 0 and at most 1 (off).")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"--min-p is {self.min_p}; use a number from 0 (off) to 1.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def finite_rows(logits: Tensor) -> Tensor:
    """Which rows of `logits` [..., V] are a distribution: no NaN, no +inf, at least one token possible. Bool [...]."""
    return logits.amax(dim=-1).isfinite()  # amax carries NaN through, and is -inf only if the whole row is


def to_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Probabilities [..., V] of `logits` [..., V] in float32, or in float64 if the logits are.

    Temperature, then top-k, then top-p, then min-p, which is the order of transformers. Temperature 0 gives a one-hot
    row on the first maximum. Rows for which `finite_rows` is false come out undefined.
    """
    if sampling.greedy:
        return _one_hot_max(logits)
    scores = logits if logits.dtype == torch.float64 else logits.float()
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        scores = _keep_top_k(scores, sampling.top_k)
    if sampling.top_p < 1:
        scores = _keep_top_p(scores, sampling.top_p)
    if sampling.min_p > 0:
        # The maximum is 0, so the relative probability of a token is exp(score).
        scores = scores.masked_fill(scores < math.log(sampling.min_p), -math.inf)
    return scores.softmax(dim=-1)


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


class RandomSource:
    """Seeded random draws. They are made on the CPU, so that a seed means the same on every device.

    Acceptance rules and the engine call only `bernoulli` and `categorical`; a test can override these two and visit
    every outcome.
    """

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self._generator = torch.Generator()
        if seed is not None and not 0 <= seed < 2**63:
            raise UserError(f"--seed is {seed}; use a whole number from 0 to 2**63 - 1.")
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._device = torch.device(device)

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
        cdf = cdf.masked_fill(~(probs > 0), 0.0)  # an impossible token can then never exceed the threshold
        total = cdf.amax(dim=-1, keepdim=True)
        threshold = self.uniform(total.shape).to(probs.device) * total
        return (cdf > threshold).to(torch.uint8).argmax(dim=-1)
