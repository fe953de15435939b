"""Greedy decoding on the embedded base, and its tokenizer's characters."""

import pytest
import torch
from torch import Tensor

from decode.decoder import Decoder
from decode.engine import Engine
from decode.request import Request
from decode.target import BaseTarget
from decode.text import TextStream, encode, plain_text
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.initialise import new_heads
from tests.decode.toys import BaseDrafter, decode

# Logits are about 20 wide; float32 products of another shape move them by some 1e-4. The gap to the second-best token
# is below this in about one of 2,000 positions.
MARGIN = 1e-3


def worst_gap(base: FrozenBase, prompt: list[int], tokens: list[int]) -> float:
    """How far any committed token is below the maximum when the base reads the whole text at once."""
    text = torch.tensor([prompt + tokens])
    hidden = base.forward(text).hidden[:, len(prompt) - 1 : -1]
    logits = base.logits(hidden)[0]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((logits.amax(dim=-1) - chosen).max())


class Disturbed:
    """Moves the maximum elsewhere in about every third row, so that drafts are accepted and rejected."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, logits: Tensor) -> Tensor:
        spoil = float(torch.rand(1, generator=self.generator)) < 0.3
        return logits.roll(1, dims=-1) if spoil else logits


def test_greedy_is_the_argmax_under_teacher_forcing(smollm2: FrozenBase) -> None:
    prompt = encode(smollm2.tokenizer, "Why is the sky blue?", chat=True)
    engine = Engine(BaseTarget(smollm2), BaseDrafter(smollm2, disturb=Disturbed()))
    tokens, stats = decode(engine, prompt, 24, 3, request=Request())
    assert 0 < stats.accepted < stats.drafted
    assert stats.rule == "greedy"
    assert worst_gap(smollm2, prompt, list(tokens)) < MARGIN
    spoiled = [*tokens[:12], tokens[12] + 1, *tokens[13:]]
    assert worst_gap(smollm2, prompt, spoiled) > MARGIN  # the negative control


def test_untrained_heads_change_nothing_but_speed(smollm2: FrozenBase) -> None:
    torch.manual_seed(0)
    vocabulary = torch.arange(8_192)
    decoder = Decoder(smollm2, new_heads(HeadsOptions(draft_length=4), smollm2, vocabulary))
    result = decoder.generate("Name three colours.", max_new_tokens=16)
    prompt = encode(smollm2.tokenizer, "Name three colours.", chat=True)
    assert result.stats.drafted > 0
    assert worst_gap(smollm2, prompt, result.token_ids) < MARGIN
    assert result.text == smollm2.tokenizer.decode(result.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", ["héllo 👩‍🚀 wörld 世界", "  two  spaces , and : marks 's", "नमस्ते\n\n🎉🎉"])
def test_pieces_of_every_token_never_break_a_character(smollm2: FrozenBase, text: str) -> None:
    ids = smollm2.tokenizer(text)["input_ids"]
    stream = TextStream(plain_text(smollm2.tokenizer, special=False))
    pieces = [stream.push([token]) for token in ids] + [stream.push([], final=True)]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert any(not piece for piece in pieces[:-1]) == any(ord(character) > 0x2000 for character in text)
