"""The same path on an accelerator; run with `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from decode import Decoder
from mtp.base import FrozenBase
from mtp.hub import load_heads
from tests.train.runs import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_train_and_decode_on_a_gpu(precision: str, tmp_path: Path) -> None:
    run = train(tmp_path, trainer__accelerator="gpu", trainer__devices=1, trainer__precision=precision)
    heads = load_heads(run / "heads")
    assert {p.dtype for p in heads.parameters()} == {torch.float32}
    decoder = Decoder.from_pretrained(run / "heads", device="cuda", dtype="bfloat16")
    for temperature in (0.0, 1.0):
        result = decoder.generate("what is 2 and 3?", max_new_tokens=24, temperature=temperature, seed=0)
        assert result.stats.committed == len(result.token_ids) > 0


def test_greedy_on_a_gpu_is_the_base_under_teacher_forcing(tmp_path: Path) -> None:
    """Every committed token is the base's argmax in a recomputation, or within 0.1 of it in bf16 logits."""
    run = train(tmp_path, trainer__accelerator="gpu", trainer__devices=1)
    decoder = Decoder.from_pretrained(run / "heads", device="cuda", dtype="bfloat16")
    base: FrozenBase = decoder.base
    prompt = [5, 9, 12, 7]
    ids = decoder.generate(prompt, max_new_tokens=64).token_ids
    tokens = torch.tensor([prompt + ids], device="cuda")
    logits = base.logits(base.forward(tokens).hidden)[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(ids, device="cuda").unsqueeze(1)).squeeze(1)
    assert float((logits.max(-1).values - chosen).max()) < 0.1
