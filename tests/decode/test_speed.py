"""`--compile`: faster steps, the same text, and a sentence where it cannot be had."""

from pathlib import Path

import pytest

from decode import Decoder, speed
from decode.cli import main
from decode.speed import speed_up
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads
from mtp.hub import save_heads
from mtp.initialise import new_heads
from mtp.kernels import NoKernels
from tests.tiny import tiny_base


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    base = tiny_base("llama", tmp_path)
    save_heads(new_heads(HeadsOptions(draft_length=3), base), tmp_path / "heads", card="")
    return tmp_path / "heads"


def load(folder: Path, home: Path, mode: str, said: list[str]) -> Decoder:
    return Decoder.from_pretrained(folder, device="cpu", compile=mode, home=home, on_progress=said.append)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}, {"tree": "2,1"}])
def test_the_text_stays(trained: Path, compiled_home: Path, settings: dict[str, object]) -> None:
    said: list[str] = []
    plain, fast = (load(trained, compiled_home, mode, said) for mode in ("off", "on"))
    assert plain.base.steps is None
    assert fast.base.steps is not None
    assert fast.base.kernels is not None
    assert isinstance(fast.heads, Heads)
    assert fast.heads.kernels is fast.base.kernels
    texts = [d.generate("the user", max_new_tokens=60, ignore_eos=True, **settings).token_ids for d in (plain, fast)]
    assert texts[0] == texts[1]
    assert not said


def test_without_a_compiler_one_sentence_and_torch(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(folder: Path) -> None:
        raise NoKernels("no C compiler was found")

    monkeypatch.setattr(speed, "load", none)
    said: list[str] = []
    decoder = load(trained, tmp_path, "auto", said)
    assert len(said) == 1
    assert "no C compiler was found" in said[0]
    assert decoder.base.steps is None
    with pytest.raises(UserError, match="--compile is on, but .* no C compiler"):
        load(trained, tmp_path, "on", said)
    load(trained, tmp_path, "off", said)
    assert len(said) == 1


def test_a_base_that_cannot_be_read_keeps_the_kernels(tmp_path: Path, compiled_home: Path) -> None:
    said: list[str] = []
    base = tiny_base("gemma3", tmp_path)
    speed_up(base, None, "auto", compiled_home, said.append)
    assert len(said) == 1
    assert "run in transformers" in said[0]
    assert base.steps is None
    assert base.kernels is not None
    with pytest.raises(UserError, match="--compile is on, but steps of base"):
        speed_up(base, None, "on", compiled_home, said.append)


def test_half_precision_is_left_alone(tmp_path: Path, compiled_home: Path) -> None:
    said: list[str] = []
    base = tiny_base("llama", tmp_path)
    base.model.bfloat16()
    speed_up(base, None, "auto", compiled_home, said.append)
    assert not said
    assert base.kernels is None
    with pytest.raises(UserError, match="bfloat16 on cpu"):
        speed_up(base, None, "on", compiled_home, said.append)


def test_another_word_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="--compile is 'fast'; use one of auto, on, off"):
        speed_up(tiny_base("llama", tmp_path), None, "fast", tmp_path, print)  # type: ignore[arg-type]
    assert main(["generate", "--heads", "x", "--prompt", "x", "--compile", "fast"]) == 2
    assert "--compile" in capsys.readouterr().err
