"""What `decode.check` says, and what it needs to say it.

Knows: the shape of a finding, the prompts, and what float error may explain. Refuses to gather evidence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decode.decoder import Decoder
from decode.stats import DecodeStats
from decode.text import Prompt, encode

PROMPTS = ("Why is the sky blue?", "Write two sentences about a lighthouse.", "List three uses of salt.")
MARGINS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}
"""How far float error may move logits when the base runs over another number of rows. Measured for float32 (2e-4 on a
135M base, where logits span about 40); the others scale with the precision."""


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """How much evidence to gather."""

    prompts: Sequence[Prompt] = PROMPTS
    samples: int = 2000
    """Texts begun per chi-square test."""
    max_new_tokens: int = 40
    """Tokens per text of the greedy and the reproducible checks."""
    seed: int = 0


@dataclass
class Finding:
    """One line of the report."""

    name: str
    passed: bool
    text: str
    """What was measured, for people."""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Drafts:
    """Counts over all checks of exact rules; a check in which nothing was drafted, kept or rejected proves nothing."""

    drafted: int = 0
    accepted: int = 0

    def add(self, other: "DecodeStats | Drafts") -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def rejected(self) -> int:
        return self.drafted - self.accepted


def prompt_ids(decoder: Decoder, prompt: Prompt) -> list[int]:
    """The prompt's token ids, in the chat template if the base has one."""
    return encode(decoder.base.tokenizer, prompt, chat=True)


def teacher_forced(decoder: Decoder, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The base's logits [T, V] for `tokens` after `prompt`, read as one text without a cache."""
    text = torch.tensor([[*prompt, *tokens]], device=decoder.base.device)
    hidden = decoder.base.forward(text).hidden[0, len(prompt) - 1 : -1]
    return decoder.base.logits(hidden)
