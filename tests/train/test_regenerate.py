"""Answers come from the base's own distribution, and their file survives a kill and is continued."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.batch import Progress, decode_many
from decode.prompts import read_prompts
from decode.text import encode
from mtp.base import FrozenBase
from mtp.errors import UserError
from mtp.sampling import SamplingConfig, to_probs
from tests.tiny import CONTEXT, exact_base, save_tiny, tiny_base, tiny_tokenizer
from train import regenerate as module
from train.answers import AnswerFile
from train.cli import main
from train.records import read_records
from train.regenerate import TOO_LONG, UNKNOWN, RegenerateReport, regenerate
from train.template import REFUSED

PROMPTS = [({"role": "user", "content": "say " + "the ant " * (i % 5) + str(i)},) for i in range(10)]


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    """In float64, so that the composition of a batch cannot decide a near tie; many tokens end a text."""
    base = exact_base("llama")
    base.model.generation_config.eos_token_id = [2, *range(40, 48)]
    return base


@pytest.fixture(scope="module")
def whole(base: FrozenBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an undisturbed run; tests that change it work on a copy."""
    out = tmp_path_factory.mktemp("whole") / "new" / "d.jsonl"
    report = run(base, out, source="demo")
    assert (report.written, report.found, report.skipped) == (10, 0, Counter())
    assert report.seconds > 0
    return out


def copy(whole: Path, folder: Path) -> Path:
    for path in whole.parent.iterdir():
        shutil.copy(path, folder / path.name)
    return folder / whole.name


def run(base: FrozenBase, out: Path, prompts: Any = PROMPTS, **options: Any) -> RegenerateReport:
    settings = {"max_new_tokens": 6, "temperature": [0.0, 1.0], "batch_size": 4, "seed": 1, "source": "demo"}
    return regenerate(base, prompts, out, **(settings | options))


def rows(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["index"])


def test_every_prompt_is_answered_once(whole: Path) -> None:
    assert [row["index"] for row in rows(whole)] == list(range(10))
    for row, prompt in zip(rows(whole), PROMPTS, strict=True):
        assert row["messages"][:-1] == list(prompt)
        assert row["messages"][-1]["role"] == "assistant"
        assert row["source"] == "demo"
        assert row["temperature"] == row["index"] % 2
    assert {row["finish_reason"] for row in rows(whole)} == {"stop", "length"}


def test_what_is_written_can_be_trained_on(whole: Path) -> None:
    lines = [json.loads(line) for line in whole.read_text().splitlines()]
    assert [r.finished for r in read_records(str(whole))] == [line["finish_reason"] == "stop" for line in lines]


def test_an_answer_depends_on_seed_and_index_and_not_on_its_batch(
    base: FrozenBase, whole: Path, tmp_path: Path
) -> None:
    run(base, tmp_path / "b.jsonl", batch_size=10)
    assert rows(whole) == rows(tmp_path / "b.jsonl")
    state = torch.random.get_rng_state()
    run(base, tmp_path / "c.jsonl", seed=2, batch_size=10)
    assert torch.random.get_rng_state().equal(state)
    a, c = rows(whole), rows(tmp_path / "c.jsonl")
    assert [r for r in a if r["temperature"] == 0] == [r for r in c if r["temperature"] == 0]
    assert [r for r in a if r["temperature"] == 1] != [r for r in c if r["temperature"] == 1]


def test_greedy_answers_are_the_bases_own(base: FrozenBase, whole: Path) -> None:
    for row, prompt in list(zip(rows(whole), PROMPTS, strict=True))[:4:2]:
        ids, count = encode(base.tokenizer, prompt, chat=True), 0
        new: list[int] = []
        while count < 6 and not (new and new[-1] in base.eos_token_ids):
            hidden = base.forward(torch.tensor([ids + new])).hidden
            new.append(int(base.logits(hidden[0, -1]).argmax()))
            count += 1
        stopped = new[-1] in base.eos_token_ids
        assert (
            base.tokenizer.decode(new[:-1] if stopped else new, skip_special_tokens=True)
            == row["messages"][-1]["content"]
        )
        assert row["finish_reason"] == ("stop" if stopped else "length")


def test_sampled_tokens_follow_the_base(base: FrozenBase, tmp_path: Path) -> None:
    """First tokens of 600 equal prompts against p: chi-square over tokens expected 5 times, false alarm below 1 in 1e4
    for a random seed, and the seed is fixed.

    The negative control, p at another temperature, must fail the same test.
    """
    count, prompt = 600, PROMPTS[1]
    run(base, tmp_path / "d.jsonl", [prompt] * count, max_new_tokens=1, temperature=0.8, batch_size=200)
    hidden = base.forward(torch.tensor([encode(base.tokenizer, prompt, chat=True)])).hidden
    logits = base.logits(hidden[0, -1])
    texts = Counter(row["messages"][-1]["content"] for row in rows(tmp_path / "d.jsonl"))

    def excess(temperature: float) -> float:
        """Chi-square in standard deviations above its mean; the rare tokens are pooled."""
        expected: dict[str, float] = defaultdict(float)
        for token, prob in enumerate(to_probs(logits, SamplingConfig(temperature=temperature)).tolist()):
            text = "" if token in base.eos_token_ids else base.tokenizer.decode([token], skip_special_tokens=True)
            expected[text] += prob * count
        common = [text for text, n in expected.items() if n >= 5]
        cells = [(texts[text], expected[text]) for text in common]
        cells.append((count - sum(o for o, _ in cells), count - sum(e for _, e in cells)))
        degrees = len(cells) - 1
        chi = sum((o - e) ** 2 / e for o, e in cells if e > 1e-9)
        return (chi - degrees) / (2 * degrees) ** 0.5

    assert excess(0.8) < 6
    assert excess(2.0) > 6


def test_defaults_of_the_model_do_not_shape_answers(base: FrozenBase, whole: Path, tmp_path: Path) -> None:
    kept = base.model.generation_config
    changed = type(kept).from_dict({**kept.to_dict(), "repetition_penalty": 5.0, "suppress_tokens": list(range(3, 30))})
    base.model.generation_config = changed
    try:
        run(base, tmp_path / "b.jsonl")
        assert base.model.generation_config is changed
    finally:
        base.model.generation_config = kept
    assert rows(whole) == rows(tmp_path / "b.jsonl")


def test_a_killed_run_is_continued_to_the_same_file(
    base: FrozenBase, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after some answers, with half a line on disk as after a kill inside a write."""
    out = tmp_path / "d.jsonl"

    def dies(*args: Any, **options: Any) -> Iterator[Progress]:
        written = 0
        for step in decode_many(*args, **options):
            yield step
            written += len(step.finished)
            if written >= 4:
                raise KeyboardInterrupt

    monkeypatch.setattr(module, "decode_many", dies)
    with pytest.raises(KeyboardInterrupt):
        run(base, out)
    monkeypatch.undo()
    kept = rows(out)
    assert 4 <= len(kept) < 8, "what was done before it stopped is kept"
    with out.open("a") as file:
        file.write('{"messages": [{"role": "user", "con')
    seen: list[tuple[int, int, int]] = []
    report = run(base, out, on_progress=lambda *now: seen.append(now))
    assert (report.written, report.found) == (10 - len(kept), len(kept))
    assert rows(out) == rows(whole)
    assert seen[0][0] >= len(kept)
    assert {total for _, total, _ in seen} == {10}
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert seen[-1] == (10, 10, report.tokens)
    assert [s[2] for s in seen] == sorted(s[2] for s in seen)
    assert run(base, out).written == 0
    assert rows(out) == rows(whole)


def test_kill_9_in_the_middle(tmp_path: Path) -> None:
    """A process that is killed once it has written something leaves whole lines, which the next run leaves alone."""
    out, prompts = tmp_path / "d.jsonl", tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(400)))
    arguments = ["regenerate", "--base", str(save_tiny("llama", tmp_path / "llama")), "--prompts", str(prompts)]
    arguments += ["--out", str(out), "--max-new-tokens", "40", "--temperature", "1", "--batch-size", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not (out.exists() and out.stat().st_size > 2000) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = out.read_text().rpartition("\n")[0]
    assert 0 < before.count("\n") + 1 < 400, "the kill came too late to test anything"
    assert main([*arguments, "--batch-size", "64"]) == 0
    assert out.read_text().startswith(before)
    assert [row["index"] for row in rows(out)] == list(range(400))


@pytest.mark.parametrize("keep", [0, 1, 40])
def test_a_kill_in_the_first_write_leaves_nothing_in_the_way(whole: Path, tmp_path: Path, keep: int) -> None:
    out = copy(whole, tmp_path)
    out.write_bytes(out.read_bytes()[:keep])
    settings = {"seed": 2}  # nothing is written yet, so that the settings may still change
    with AnswerFile(out, settings, PROMPTS) as file:
        assert file.done == set()
        file.append([{"index": 0, "messages": [*PROMPTS[0], {}]}])
    with AnswerFile(out, settings, PROMPTS) as file:
        assert file.done == {0}


def test_a_full_disk_is_one_message_and_keeps_what_was_written(
    base: FrozenBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    file = AnswerFile(tmp_path / "d.jsonl", {}, PROMPTS)
    monkeypatch.setattr("train.answers.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"), file:
        file.append([{"index": 0}])
    assert json.loads((tmp_path / "d.jsonl").read_text()) == {"index": 0}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"temperature": 0.5}, r"begun with temperature \[0.0, 1.0\], and now temperature is \[0.5\]"),
        ({"max_new_tokens": 11}, "begun with max_new_tokens 6"),
        ({"seed": 2}, "begun with seed 1"),
        ({"prompts": PROMPTS[::-1]}, "answers another prompt than number"),
        ({"base": exact_base("llama", seed=5)}, "begun with fingerprint"),
    ],
)
def test_other_settings_are_refused(
    base: FrozenBase, whole: Path, tmp_path: Path, changed: dict[str, Any], complaint: str
) -> None:
    out = copy(whole, tmp_path)
    before = out.read_bytes()
    with pytest.raises(UserError, match=complaint):
        run(**({"base": base, "out": out} | changed))
    assert out.read_bytes() == before


def test_more_prompts_at_the_end_are_added(base: FrozenBase, whole: Path, tmp_path: Path) -> None:
    out = copy(whole, tmp_path)
    out.write_text("".join(line for line in out.open() if json.loads(line)["index"] < 7))
    assert run(base, out, PROMPTS[:7]).written == 0
    assert run(base, out, PROMPTS).written == 3
    assert rows(out) == rows(whole)


def test_foreign_files_are_left_alone(base: FrozenBase, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "d.jsonl"
    out.write_text('{"text": "mine"}\n')
    with pytest.raises(UserError, match="has no d.jsonl.meta.json beside it"):
        run(base, out)
    assert out.read_text() == '{"text": "mine"}\n'
    out = copy(whole, tmp_path)
    with out.open("a") as file:
        file.write('{"text": "mine"}\n')
    with pytest.raises(UserError, match=r"d.jsonl:11: not an answer with index and messages"):
        run(base, out)
    (tmp_path / "d.jsonl.meta.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        run(base, out)
    with pytest.raises(UserError, match="cannot be written"):
        run(base, tmp_path)


def test_prompts_that_cannot_be_answered_are_counted(base: FrozenBase, tmp_path: Path) -> None:
    prompts = [PROMPTS[0], ({"role": "user", "content": "the " * CONTEXT},), PROMPTS[2]]
    report = run(base, tmp_path / "d.jsonl", prompts, max_new_tokens=1)
    assert (report.written, report.skipped) == (2, {TOO_LONG: 1})
    assert [row["index"] for row in rows(tmp_path / "d.jsonl")] == [0, 2]
    small = FrozenBase.from_model(base.model, tiny_tokenizer(), base.name)
    template = small.tokenizer.chat_template
    small.tokenizer.chat_template = "{{ raise_exception('no') if 'ant' in messages[0]['content'] }}" + template
    assert run(small, tmp_path / "e.jsonl", PROMPTS[:2], max_new_tokens=1).skipped == {REFUSED: 1}
    small.tokenizer.chat_template = template
    small.tokenizer.add_tokens([f"zebra{i}" for i in range(small.vocab_size)])
    prompts = [PROMPTS[0], f"zebra{small.vocab_size - 1}"]
    assert run(small, tmp_path / "f.jsonl", prompts, max_new_tokens=1).skipped == {UNKNOWN: 1}


def test_prompts_come_in_every_form_of_a_prompt_file(base: FrozenBase, whole: Path, tmp_path: Path) -> None:
    """Text and turns give the same conversation; the answers of an earlier run are prompts again."""
    lines = [
        {"prompt": PROMPTS[0][0]["content"]},
        {"turns": [PROMPTS[1][0]["content"]]},
        *rows(whole)[2:4],
        {"messages": list(PROMPTS[4])},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(base, tmp_path / "d.jsonl", read_prompts(tmp_path / "p.jsonl"))
    assert rows(tmp_path / "d.jsonl") == rows(whole)[:5]
    with pytest.raises(UserError, match="prompt 1 has no user turn"):
        run(base, tmp_path / "e.jsonl", [[{"role": "assistant", "content": "a"}]])
    with pytest.raises(UserError, match="prompt 1: message 1 has the role 'bot'"):
        run(base, tmp_path / "e.jsonl", [[{"role": "bot", "content": "a"}]])


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens is 0; allowed is 1 to 255"),
        ({"max_new_tokens": CONTEXT}, "--max-new-tokens is 256"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"temperature": -1.0}, "--temperature is -1.0"),
        ({"temperature": []}, "--temperature is an empty list"),
    ],
)
def test_settings_out_of_range(base: FrozenBase, tmp_path: Path, wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        run(base, tmp_path / "d.jsonl", **wrong)
    assert not (tmp_path / "d.jsonl").exists()


def test_a_base_from_disk_in_float32(tmp_path: Path) -> None:
    report = run(tiny_base("gpt2", tmp_path), tmp_path / "d.jsonl", PROMPTS[:3])
    assert report.written == 3
