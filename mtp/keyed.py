"""Random draws keyed by (seed, absolute position), for decoding that can be reproduced whatever is drafted.

Knows: one vector of exponentials per seed and position, shared by whoever draws there: q for a draft, p for the token
that may replace it. The token is the first to arrive in an exponential race, argmin E_x / p_x, which has law p (Gumbel
coupling). So the text for a seed depends on p alone: not on K, the heads, the batch, or whether anything is drafted.
Refuses to know: which of the two models draws, and acceptance rules that need uniform numbers.

Shapes: B batch, K draft position, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mtp.sampling import RandomSource, check_seed


class KeyedSource(RandomSource):
    """Draws of one text or, with a seed and a position for each, of a batch of texts."""

    def __init__(self, *seeds: int, device: torch.device | str = "cpu") -> None:
        for seed in seeds:
            check_seed(seed)
        self._seeds = seeds
        self._positions = [0] * len(seeds)
        self._device = torch.device(device)
        self._noise: dict[tuple[int, int], Tensor] = {}

    def seek(self, *positions: int) -> None:
        """The next draw of each text is for this absolute position (the prompt's first token has 0)."""
        assert len(positions) == len(self._seeds), (positions, self._seeds)
        self._positions = list(positions)
        first = min(positions)
        self._noise = {key: noise for key, noise in self._noise.items() if key[1] >= first}

    def bernoulli(self, prob: Tensor) -> Tensor:
        raise NotImplementedError("keyed draws decide by matching; use the match rule")

    def uniform(self, shape: Sequence[int]) -> Tensor:
        raise NotImplementedError("keyed draws are made by categorical()")

    def categorical(self, probs: Tensor) -> Tensor:
        """Token ids in proportion to `probs` [V], [B, V], or [B, K, V] for K positions in a row; moves on by 1 or K.

        Never a token of probability 0, as long as a row has any mass; a row without mass gives 0.
        """
        rows = probs.reshape(len(self._seeds), -1, probs.shape[-1])
        noise = torch.stack([self._vectors(text, rows.shape[1], rows.shape[2]) for text in range(rows.shape[0])])
        self._positions = [position + rows.shape[1] for position in self._positions]
        # p / E is largest where E / p is smallest, and 0 where p is 0.
        return (rows.double() / noise).argmax(dim=-1).reshape(probs.shape[:-1])

    def _vectors(self, text: int, count: int, vocab_size: int) -> Tensor:
        """[count, V] float64 exponentials of the next positions of a text."""
        start = self._positions[text]
        keys = [(self._seeds[text], position) for position in range(start, start + count)]
        for key in keys:
            if key not in self._noise:
                self._noise[key] = torch.from_numpy(exponentials(*key, vocab_size)).to(self._device)
        return torch.stack([self._noise[key] for key in keys])


def exponentials(seed: int, position: int, count: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """`count` standard exponentials, positive and finite, that depend on (seed, position) only.

    Philox is a function of key and counter (Salmon et al. 2011, doi 10.1145/2063384.2063405), so every pair has a
    stream of its own; a generator that is only seeded keeps 32 bits of the seed in some libraries.
    """
    raw = np.random.Philox(key=seed, counter=[0, 0, position, 0]).random_raw(count)
    # 52 bits and a half fit a float64 exactly: neither 0 nor 1 can come out.
    uniform = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(uniform)


def race_gap(p: Tensor, seed: int, position: int, tokens: tuple[int, int]) -> float:
    """By how much log p [V] would have to move for the race at `position` to turn from one of two tokens to the other.

    The winner has the largest log p - log E.
    """
    noise = torch.from_numpy(exponentials(seed, position, p.shape[-1])).to(p.device)
    score = p.double().log() - noise.log()
    return abs(float(score[tokens[0]] - score[tokens[1]]))
