"""The same prompts by our engine, counted as vLLM counts.

vLLM reads the whole prompt and takes a first token from it before it drafts; our engine drafts from the prompt on. So
ours begins with that first token as the end of the prompt. vLLM counts the whole of a step that the end of a text cuts
off; ours decodes further and stops counting at that step.

Knows: how to align the steps of two engines, and how near two tokens were. Refuses to know: servers and formats.

Shapes: K draft position, T position, V vocabulary.
"""

from dataclasses import dataclass

import torch

from decode import Decoder
from tests.serving.server import Counts

TIE = 1e-2
"""Logits that are nearer than this may come in another order when sums do; they are of size 10 to 20 in SmolLM2."""


@dataclass(frozen=True)
class Difference:
    """Where two texts part: the place, both tokens, and how much larger the first one's logit is."""

    place: int
    tokens: tuple[int, int]
    gap: float

    @property
    def is_tie(self) -> bool:
        return abs(self.gap) < TIE


def follow(decoder: Decoder, prompt: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """Our text after `prompt`, and of each step behind its first token how many drafts were accepted."""
    k = decoder.heads.config.draft_length if decoder.heads else 0
    first = decoder.generate(prompt, max_new_tokens=1, draft_length=0, ignore_eos=True).token_ids
    text, accepted = first, []
    stream = decoder.stream([*prompt, *first], max_new_tokens=max_tokens + k, ignore_eos=True)
    while len(text) < max_tokens:
        piece = next(stream)
        text = [*text, *piece.token_ids]
        accepted.append(sum(piece.drafted))
    return text[:max_tokens], accepted


def count(accepted: list[int], k: int) -> Counts:
    """Of steps that accepted so many drafts."""
    return Counts(len(accepted), [sum(number > place for number in accepted) for place in range(k)])


@torch.inference_mode()
def difference(decoder: Decoder, prompt: list[int], one: list[int], other: list[int]) -> Difference | None:
    """Where two texts of a prompt part, judged by our base in one forward; None if they do not."""
    pairs = list(zip(one, other, strict=True))
    place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if place is None:
        return None
    base = decoder.base
    tokens = torch.tensor([[*prompt, *one[:place]]], device=base.device)
    logits = base.logits(base.forward(tokens).hidden[:, -1])[0]
    return Difference(place, pairs[place], float(logits[pairs[place][0]] - logits[pairs[place][1]]))
