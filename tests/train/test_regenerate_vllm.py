"""What vLLM is asked, and what becomes of its answers, with a stand-in that has the parts of its interface we use."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mtp.errors import UserError
from tests.tiny import save_tiny, tiny_base
from tests.train.runs import write_prompts
from train import vllm_engine as module
from train.cli import main
from train.options import BaseOptions
from train.regenerate import row_seed

ANSWER = [20, 21, 22]


class FakeModel:
    """Says ANSWER to all prompts; every other one ends by itself."""

    calls: list[tuple[list[Any], list[Any]]]

    def __init__(self, **options: Any) -> None:
        if options["model"] == "broken":
            raise ValueError("no such architecture\nlong traceback")
        self.options = options
        type(self).calls = []
        type(self).last = self

    last: "FakeModel"

    def generate(self, prompts: list[Any], settings: list[Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.calls.append((prompts, settings))
        done = []
        for i, setting in enumerate(settings):
            stops = i % 2 == 0
            ids = [*ANSWER, 2] if stops and i % 4 else ANSWER  # the ending token comes with the ids, or is named
            ids = (ids * setting.max_tokens)[: setting.max_tokens] if not stops else ids
            reason = "stop" if stops else "length"
            done.append(
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(token_ids=tuple(ids), finish_reason=reason, stop_reason=2 if stops else None)
                    ]
                )
            )
        return done


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeModel]:
    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = FakeModel, SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    return FakeModel


def command(tmp_path: Path) -> list[str]:
    base, prompts = save_tiny("llama", tmp_path / "llama"), write_prompts(tmp_path / "p.jsonl")
    arguments = ["regenerate", "--base", str(base), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")]
    return [*arguments, "--engine", "vllm", "--max-new-tokens", "6", "--temperature", "0", "0.7"]


def test_vllm_answers_and_the_file_is_as_ever(
    tmp_path: Path, fake: type[FakeModel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PORTION", 3)
    assert main([*command(tmp_path), "--limit", "5"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    tokenizer = tiny_base("llama", tmp_path).tokenizer
    said = tokenizer.decode(ANSWER)
    assert [line["index"] for line in lines] == list(range(5))
    assert [line["finish_reason"] for line in lines] == ["stop", "length", "stop", "stop", "length"]
    assert [line["messages"][-1]["content"] for line in lines] == [said, said * 2, said, said, said * 2]
    assert "5 answers written" in capsys.readouterr().out
    assert [len(prompts) for prompts, _ in fake.calls] == [3, 2]
    settings = [setting for _, part in fake.calls for setting in part]
    assert [s.temperature for s in settings] == [0.0, 0.7, 0.0, 0.7, 0.0]
    assert [s.seed for s in settings] == [row_seed(0, str(i)) for i in range(5)]
    assert {(s.max_tokens, tuple(s.stop_token_ids), s.detokenize) for s in settings} == {(6, (2,), False)}
    options = fake.last.options
    assert options["model"] == str(tmp_path / "llama")
    assert options["generation_config"] == "vllm"
    assert main(command(tmp_path)) == 0
    assert "3 answers written, 5 already there" in capsys.readouterr().out


def test_without_vllm_the_remedy_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    arguments = command(tmp_path)
    monkeypatch.setattr("train.regenerate_cli.load_base", None)
    assert main(arguments) == 2
    assert "`pip install vllm`, or use --engine mtp" in capsys.readouterr().err
    assert main([*arguments, "--engine", "sglang"]) == 2
    assert "engine" in capsys.readouterr().err


def test_a_base_that_vllm_cannot_run(fake: type[FakeModel]) -> None:
    with pytest.raises(UserError, match=r"cannot run base 'x' \(no such architecture\); use --engine mtp"):
        module.vllm_engine(BaseOptions(name="x"), "broken")
