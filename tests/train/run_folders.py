"""Folders of runs that never took place, for tests of pages."""

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path

from decode.stats import DecodeStats
from decode.trace import TracedText, TracedToken
from train.samples import Samples, write_samples

BEST = {"step": 20}


def word(text: str, origin: str = "accepted", *rejected: str) -> TracedToken:
    return TracedToken(text, text, origin, rejected)  # type: ignore[arg-type]


TEXTS = [
    TracedText("Why is the sky blue? 🌍", "explain", "length", (
        (word("The", "recovered", "A"),),
        (word(" sky"), word(" is"), word(" blue", "bonus")),
        (word(" because"), word(" of", "recovered", " the")),
        (word(" Rayleigh", "plain"),), (word(" scatter"), word("ing", "recovered", "ed")), (word(".\n", "bonus"),),
    )),
    TracedText("اكتب قصة قصيرة <b>bold</b>", "story", "stop", (
        (word("كان"), word(" يا", "recovered", " في")), (word(" ما"), word(" كان", "bonus")),
        (word("👩‍🚀"), word("<script>alert(1)</script>", "recovered", "&amp;")),
    )),
]  # fmt: skip


def metrics_at(step: int, positions: int = 3) -> dict[str, float]:
    """What a validation and a report of training might record."""
    wave = math.sin(step / 7)
    found = {
        "val/accept_len_implied": 1.9 - 0.01 * abs(step - 20),
        "val/accept_len_implied_greedy": 1.7 + 0.01 * wave,
        "val/loss": 1 / (1 + step),
        "val/draft_vocab_coverage": 0.98,
        "decode/accept_len": 1.6 + 0.05 * wave,
        "decode/tok_per_s": 50 + wave,
        "train/loss": 1.1 / (1 + step),
        "train/accept_len_implied": 1.8 + 0.002 * step,
        "train/accept_len_implied_greedy": 1.75 + 0.002 * step,
        "train/lr": 1e-4 / (1 + step),
        "train/grad_norm": 30 + wave,
        "train/tokens_per_s": 1234.5 + wave,
        "train/peak_share": 0.5,
        "decode/share/verify": 0.8,
        "decode/share/draft": 0.1 + 0.01 * wave,
        "decode/share/rule": 0.04,
        "decode/share/other": 0.06 - 0.01 * wave,
        "decode/verify_ms_per_row": 3.0 + wave,
    }
    for k in range(1, positions + 1):
        share = 0.7 / k + 0.001 * step
        found |= {f"val/alpha/{k}": share, f"val/cumulative/{k}": share**k, f"val/greedy/{k}": share * 0.9}
        found |= {f"decode/alpha/{k}": share * 0.95, f"decode/accepted/{k}": share**k * 0.9}
        found |= {f"decode/conditional/{k}": share * 0.93, f"decode/committed/{k}": 1 / (1 + positions)}
        found |= {f"val/loss/{k}": 2 - share, f"train/loss/{k}": 2 - share, f"train/grad_norm/{k}": share / 100}
        found |= {f"train/alpha/{k}": share, f"val/top_mass/{k}": share * 0.8}
    return found


def write_metrics(folder: Path, rows: Mapping[int, Mapping[str, float]], version: int = 0) -> None:
    """As Lightning's CSV logger does."""
    names = sorted({"step", *(name for row in rows.values() for name in row)})
    path = folder / "csv" / f"version_{version}" / "metrics.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows([{"step": step, **row} for step, row in rows.items()])


def write_run(folder: Path, steps: range = range(10, 60, 10), positions: int = 3, finished: bool = True) -> Path:
    """A run with a validation at each of `steps`, of which that of step 20 was the best."""
    write_metrics(folder, {step: metrics_at(step, positions) for step in steps})
    record: dict[str, object] = {
        "command": ["mtp-train", "--config", "configs/demo.yaml"],
        "seed": 0,
        "git_revision": "abc",
        "python": "3.11.7",
        "versions": {"torch": "2.13.0", "mtp-heads": "0.1.0"},
    }
    if 20 in steps:
        measured = {key: value for key, value in metrics_at(20, positions).items() if not key.startswith("train/")}
        record["best"] = {"step": 20, **measured}
    if finished:
        record |= {"steps": 50, "tokens_trained": 123_456, "seconds_training": 600.0, "parameters": 5_089_536}
        record |= {"device": "cpu", "threads": 2}
    (folder / "run.json").write_text(json.dumps(record))
    heads = {"kind": "recurrent", "draft_length": positions, "draft_vocab_size": 8192, "vocab_size": 49152}
    heads |= {"feature_layers": [10, 20, 29], "base": {"name": "smollm2-135m", "revision": None}}
    (folder / "heads").mkdir()
    (folder / "heads" / "config.json").write_text(json.dumps(heads))
    stats = DecodeStats("greedy", positions, steps=9, committed=15, histogram=[4, 4, 1, 0][: positions + 1])
    stats.seconds |= {"prefill": 0.5, "draft": 0.2, "verify": 1.5, "rule": 0.05, "other": 0.1}
    write_samples(folder, Samples(20, stats.to_json(), TEXTS))
    return folder
