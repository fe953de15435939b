"""What `--wandb` and `--stats` keep, and that its counts are those that vLLM would have served for the same steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decode.cli import main
from decode.stats import DecodeStats
from decode.telemetry import decode_metrics, flat, vllm_counters
from mtp.config import HeadsOptions
from mtp.hub import save_heads
from mtp.initialise import new_heads
from tests.tiny import tiny_base
from tests.train.wandb_records import history

pytestmark = pytest.mark.usefixtures("one_thread")


def counted() -> DecodeStats:
    """Three steps: 2 of 2 drafts kept; 0 of 2; a last one without drafts."""
    stats = DecodeStats("greedy", 2)
    stats.record(2, 2, 3, [0.9, 0.8])
    stats.record(2, 0, 1, [0.4, 0.3])
    stats.record(0, 0, 1, [])
    stats.seconds.update(prefill=5.0, draft=1.0, verify=2.5, rule=0.5, other=1.0)
    return stats


def test_counters_are_vllms() -> None:
    """vLLM counts a draft per request and step with drafts, and positions from 0 (`SpecDecodingStats`)."""
    counters = vllm_counters(counted())
    assert counters == {
        "spec_decode_num_drafts": 2,
        "spec_decode_num_draft_tokens": 4,
        "spec_decode_num_accepted_tokens": 2,
        "spec_decode_num_accepted_tokens_per_pos": [1, 1],
    }
    assert sum(counters["spec_decode_num_accepted_tokens_per_pos"]) == counters["spec_decode_num_accepted_tokens"]
    assert flat(counters)["spec_decode_num_accepted_tokens_per_pos/1"] == 1
    assert "spec_decode_num_accepted_tokens_per_pos" not in flat(counters)
    assert vllm_counters(DecodeStats("plain", 0))["spec_decode_num_drafts"] == 0


def test_metrics_of_decoding() -> None:
    metrics = decode_metrics(counted())
    assert metrics["decode/accept_len"] == pytest.approx(5 / 3)
    assert [metrics[f"decode/conditional/{k}"] for k in (1, 2)] == [0.5, 1.0]
    assert [metrics[f"decode/accepted/{k}"] for k in (1, 2)] == [0.5, 0.5]
    assert [metrics[f"decode/committed/{n}"] for n in (1, 2, 3)] == pytest.approx([2 / 3, 0, 1 / 3])
    assert sum(metrics[f"decode/share/{part}"] for part in ("draft", "verify", "rule", "other")) == pytest.approx(1)
    assert metrics["decode/share/verify"] == 0.5, "the prompt is no part of a step"
    assert metrics["decode/verify_ms_per_row"] == pytest.approx(2500 / 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("telemetry")
    torch.manual_seed(0)
    save_heads(new_heads(HeadsOptions(draft_length=2), tiny_base("llama", folder)), folder / "heads")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("the user", "is")))
    return folder


def run(command: str, folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, Any]]:
    """Runs a command with both options; returns what wandb recorded."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(out))
    arguments = [command, "--heads", str(folder / "heads"), "--prompts", str(folder / "prompts.jsonl")]
    arguments += ["--max-new-tokens", "9", "--temperature", "1", "--seed", "1", "--compile", "off"]
    assert main([*arguments, "--wandb", "mtp", "--stats", str(out / "stats.json"), *more]) == 0
    (path,) = out.glob("wandb/offline-run-*/*.wandb")
    return history(path)


def test_generate_is_logged_text_by_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("generate", folder, tmp_path, monkeypatch, "--json")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    stats = json.loads((tmp_path / "stats.json").read_text())
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    for name in (f"spec_decode_{name}" for name in names):
        assert 0 < rows[0][name] < rows[1][name] == report[name] == stats[name] or name.endswith("accepted_tokens")
    per_position = stats["spec_decode_num_accepted_tokens_per_pos"]
    assert [rows[1][f"spec_decode_num_accepted_tokens_per_pos/{k}"] for k in (0, 1)] == per_position
    assert stats["spec_decode_num_draft_tokens"] == stats["drafted"], "ours are there as well"
    assert rows[1]["decode/accept_len"] == pytest.approx(stats["accept_len"])
    assert [one["committed"] for one in stats["results"]] == [9, 9]
    assert report["results"][0]["text"] not in (tmp_path / "stats.json").read_text(), "numbers, not texts"
    assert {"/".join(key.split("/")[:2]) for key in rows[2]} >= {"decode/samples", "decode/failures"}
    assert [path.name for path in tmp_path.glob("*stats*")] == ["stats.json"]


def test_bench_is_logged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run("bench", folder, tmp_path, monkeypatch, "--against", "plain", "--context", "8", "--json")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert stats["spec_decode_num_drafts"] == rows[0]["spec_decode_num_drafts"] == report["spec_decode_num_drafts"] > 0
    assert rows[0]["bench/tok_per_s/plain"] == pytest.approx(report["results"][1]["tok_per_s"])
    cost = {row["bench/rows"]: row["bench/forward_ms"] for row in rows if "bench/rows" in row}
    assert cost == pytest.approx({n: 1e3 * s for n, s in enumerate(report["costs"]["forward_seconds"], 1)})
    assert [row["bench/draft_length"] for row in rows if "bench/speed_up" in row] == [1, 2]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--stats", "none/stats.json", "in a folder that exists"),
        ("--stats", "stats.txt", "ends in .json"),
        ("--wandb", "a/b", "without slashes"),
        ("--wandb", " ", "without slashes"),
    ],
)
def test_bad_places_are_refused_before_anything_is_decoded(
    option: str, value: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--heads", "no/such/heads", "--prompt", "x", option, value]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {option} is ")
    assert told in error
    assert "no/such/heads" not in error
