"""A quantised base is another p, which the text follows exactly, and which heads of the full one are accepted for."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from decode import Decoder
from decode.bench import describe
from decode.cli import main
from decode.costs import weight_bytes
from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.hub import save_heads
from mtp.initialise import new_heads
from mtp.quantise import check_quantise, quantise
from tests.tiny import save_tiny, tiny_base


@pytest.fixture
def rounding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of torchao, which need not be installed: matrices rounded to a sixteenth. Only once transformers, which
    looks for torchao as well, has loaded a model."""
    fake = ModuleType("torchao.quantization")

    def quantize_(module: nn.Module, config: object) -> None:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                part.weight.data = (part.weight.data * 16).round() / 16

    fake.quantize_, fake.Int8WeightOnlyConfig = quantize_, object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao.quantization", fake)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_heads(new_heads(HeadsOptions(draft_length=3), tiny_base("llama", tmp_path)), tmp_path / "heads", card="")
    return tmp_path / "heads"


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("compiled", ["off", "auto"])
def test_text_follows_the_rounded_base(folder: Path, tmp_path: Path, compiled: str) -> None:
    settings = {"device": "cpu", "home": tmp_path, "compile": compiled}
    full = Decoder.from_pretrained(folder, **settings)  # type: ignore[arg-type]
    rounded = Decoder.from_pretrained(folder, quantise="int8", **settings)  # type: ignore[arg-type]
    texts = [
        decoder.generate("the user", max_new_tokens=40, ignore_eos=True, draft_length=k).token_ids
        for decoder, k in ((rounded, 3), (rounded, 0), (full, 3))
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert rounded.base.fingerprint() == full.base.fingerprint()
    assert describe(rounded.base, "h")["dtype"] == "float32, int8 weights"
    assert describe(full.base, "h")["dtype"] == "float32"


@pytest.mark.usefixtures("rounding")
def test_another_kind(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--quantise is 'int3'; allowed is int8"):
        check_quantise("int3")
    assert main(["generate", "--heads", str(folder), "--prompt", "x", "--quantise", "fp8"]) == 2
    assert "--quantise is 'fp8'" in capsys.readouterr().err


def test_torchao_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(UserError, match="--quantise int8 needs torchao, .*pip install torchao"):
        check_quantise("int8")


@pytest.mark.parametrize(("dtype", "share"), [("float32", 0.4), ("bfloat16", 0.7)])
def test_with_torchao_itself(dtype: str, share: float, tmp_path: Path) -> None:
    pytest.importorskip("torchao.quantization")
    save_tiny("llama", tmp_path / "llama")
    base = FrozenBase.from_pretrained(str(tmp_path / "llama"), dtype=dtype, device="cpu")
    before, tokens = weight_bytes(base), torch.tensor([[1, 2, 3, 4]])
    wanted = base.logits(base.forward(tokens).hidden)
    quantise(base, "int8")
    found = base.logits(base.forward(tokens).hidden)
    assert weight_bytes(base) < share * before
    assert not found.equal(wanted)
    assert float((found - wanted).abs().max()) < 0.2 * float(wanted.abs().max())


@pytest.mark.usefixtures("rounding")
def test_int4_is_for_gpus(tmp_path: Path) -> None:
    """What it does there: tests/gpu."""
    with pytest.raises(UserError, match="--quantise is int4, which needs bfloat16 and a CUDA device, and base"):
        quantise(tiny_base("llama", tmp_path), "int4")
