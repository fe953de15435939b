"""An instruct base writes its own prompts: from the header of its template, different, finished, and kept."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from decode.batch import Progress, Task
from mtp.base import FrozenBase
from mtp.errors import UserError
from tests.tiny import CONTEXT, exact_base, save_tiny, tiny_tokenizer
from train.cli import main
from train.own_prompts import EMPTY, ENDLESS, REPEATED, SPECIAL, OwnPrompts, user_header, write_own_prompts
from train.regenerate import batch_engine


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    base = exact_base("llama")
    base.model.generation_config.eos_token_id = [2, *range(40, 48)]
    return base


def write(base: FrozenBase, out: Path, count: int = 12, **options: Any) -> OwnPrompts:
    settings = {"temperature": 1.0, "max_tokens": 8, "seed": 3, "engine": batch_engine(base, 4)}
    return write_own_prompts(base, count, out, **(settings | options))


def kept(out: Path) -> list[dict[str, Any]]:
    lines = (out.parent / f"{out.name}.prompts.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda row: row["index"])


def scripted(base: FrozenBase, texts: Sequence[str | list[int]], end: int = 2) -> Any:
    """An engine that gives these texts, each ended by itself; a list of ids is cut at the limit."""

    def run(tasks: Sequence[Task], max_new_tokens: int, ends: Sequence[int]) -> Iterator[Progress]:
        for task in tasks:
            text = texts[task.index]
            ids = text if isinstance(text, list) else [*base.tokenizer(text)["input_ids"], end]
            yield Progress(len(ids), [(task, ids)])

    return run


def test_the_header_is_all_that_precedes_the_text(base: FrozenBase) -> None:
    ids, ends = user_header(base)
    assert base.tokenizer.decode(ids) == "<|im_start|>user\n"
    assert set(ends) == set(base.eos_token_ids)
    other = FrozenBase.from_model(base.model, tiny_tokenizer(), "other")
    other.tokenizer.chat_template = (
        "{{ '<|im_start|>be kind<|endoftext|>' + 'user: ' + messages[0]['content'] + '<|endoftext|>' }}"
    )
    ids, ends = user_header(other)
    assert other.tokenizer.decode(ids) == "<|im_start|>be kind<|endoftext|>user:"  # the blank belongs to the first word
    assert set(ends) == {*base.eos_token_ids, 0}


def test_texts_that_make_no_prompt_are_dropped_and_counted(base: FrozenBase, tmp_path: Path) -> None:
    texts = ["what is the ant?", "", "  ", "What  is the ANT?", [5, 6, 7], "who <|im_start|> me", "why is the sky?"]
    own = write(base, tmp_path / "a.jsonl", len(texts), engine=scripted(base, texts))
    assert own.prompts == ["what is the ant?", "why is the sky?"]
    assert own.dropped == Counter({EMPTY: 2, REPEATED: 1, ENDLESS: 1, SPECIAL: 1})


def test_prompts_depend_on_seed_and_index_only(base: FrozenBase, tmp_path: Path) -> None:
    write(base, tmp_path / "a.jsonl")
    write(base, tmp_path / "b.jsonl", engine=batch_engine(base, 12))
    write(base, tmp_path / "c.jsonl", seed=4)
    assert kept(tmp_path / "a.jsonl") == kept(tmp_path / "b.jsonl") != kept(tmp_path / "c.jsonl")
    assert [row["index"] for row in kept(tmp_path / "a.jsonl")] == list(range(12))
    assert {row["source"] for row in kept(tmp_path / "a.jsonl")} == {"own"}


def test_a_stopped_run_goes_on_and_more_can_be_asked_for(base: FrozenBase, tmp_path: Path) -> None:
    whole = write(base, tmp_path / "whole.jsonl")
    out, engine = tmp_path / "a.jsonl", batch_engine(base, 4)

    def dies(tasks: Sequence[Task], max_new_tokens: int, ends: Sequence[int]) -> Iterator[Progress]:
        written = 0
        for step in engine(tasks, max_new_tokens, ends):
            yield step
            written += len(step.finished)
            if written >= 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(base, out, engine=dies)
    assert 5 <= len(kept(out)) < 12
    seen: list[tuple[int, int]] = []
    assert write(base, out, on_progress=lambda *now: seen.append(now)) == whole
    assert seen[0][0] >= 5
    assert seen[-1] == (12, 12)
    assert kept(out) == kept(tmp_path / "whole.jsonl")
    more = write(base, out, 20)
    assert more.prompts[: len(whole.prompts)] == whole.prompts
    assert write(base, out, 12) == whole
    with pytest.raises(UserError, match=r"begun with own_temperature 1.0, and now own_temperature is 0.5"):
        write(base, out, temperature=0.5)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"count": 0}, "--own-prompts is 0"),
        ({"max_tokens": 0}, "--own-max-tokens is 0; allowed is 1 to"),
        ({"max_tokens": CONTEXT}, "--own-max-tokens is 256"),
        ({"temperature": -1.0}, "--own-temperature is -1.0"),
        ({"seed": -1}, "--seed is -1"),
    ],
)
def test_settings_out_of_range(base: FrozenBase, tmp_path: Path, wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        write(base, tmp_path / "a.jsonl", **wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (None, "has no chat template"),
        ("{{ messages[0]['content'] }}", "prints nothing before"),
        ("hello", "prints nothing before"),
        ("{{ raise_exception('no system message') }}", "refuses a bare turn .no system message"),
    ],
)
def test_bases_that_cannot_speak_as_a_user(base: FrozenBase, template: str | None, complaint: str) -> None:
    other = FrozenBase.from_model(base.model, tiny_tokenizer(), "other")
    other.tokenizer.chat_template = template
    with pytest.raises(UserError, match=complaint):
        user_header(other)


def test_the_command_answers_its_own_prompts_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    folder = save_tiny("llama", tmp_path / "llama")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, *range(20, 40)]}))  # ends soon
    arguments = ["regenerate", "--base", str(folder), "--out", str(out)]
    own = [*arguments, "--own-prompts", "30", "--own-max-tokens", "40", "--max-new-tokens", "6"]
    assert main(own) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert 0 < len(lines) < 30
    assert {line["source"] for line in lines} == {"own"}
    printed = capsys.readouterr().out
    assert f"{len(lines)} answers written" in printed
    assert "skipped: own prompts" in printed
    assert main(own) == 0
    assert f"0 answers written, {len(lines)} already there" in capsys.readouterr().out
    for wrong, message in (
        (arguments, "neither is given"),
        ([*own, "--prompts", "x.jsonl"], "both are given"),
        ([*own, "--limit", "0"], "--limit is 0"),
        (own[:3] + own[5:], "--out is missing"),
        ([*own, "--own-temperature", "-2"], "--own-temperature is -2.0"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
