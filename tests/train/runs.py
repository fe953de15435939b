"""A tiny training job that goes through the real command line, for tests."""

import csv
import json
from pathlib import Path

import yaml

from tests.tiny import save_tiny
from train.cli import main

QUESTIONS = [f"what is {a} and {b}?" for a in range(6) for b in range(6)]


def write_data(path: Path) -> Path:
    """36 conversations that the tiny tokenizer can write."""
    lines = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": f"the answer to {q} is {i}."}]}
        for i, q in enumerate(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": q}) + "\n" for q in QUESTIONS[:8]))
    return path


def job(folder: Path, family: str = "llama", **changes: object) -> Path:
    """A config for a tiny base in `folder`; `changes` are dotted keys with `__` for the dot."""
    base = folder / family
    if not base.exists():
        save_tiny(family, base)
    config: dict[str, object] = {
        "seed_everything": 0,
        "run": {"name": "tiny", "dir": str(folder / "runs"), "checkpoint_every": 3, "wandb_project": None},
        "model": {
            "base": {"name": str(base)},
            "heads": {"kind": "recurrent", "draft_length": 2, "draft_vocab_size": 40},
            "loss": {"chunk": 16},
            "optimizer": {"lr": 0.01},
            "decode": {"prompts": str(write_prompts(folder / "prompts.jsonl")), "limit": 2, "max_new_tokens": 8},
        },
        "data": {
            "train": str(write_data(folder / "data.jsonl")),
            "val_size": 8,
            "batch_size": 4,
            "cache_dir": str(folder / "tokens"),
        },
        "trainer": {
            "max_steps": 6,
            "max_epochs": -1,
            "val_check_interval": 3,
            "log_every_n_steps": 1,
            "accelerator": "cpu",
            "check_val_every_n_epoch": None,
        },
    }
    for dotted, value in changes.items():
        place = config
        *parents, last = dotted.split("__")
        for parent in parents:
            place = place.setdefault(parent, {})  # type: ignore[assignment]
        place[last] = value
    path = folder / f"{len(list(folder.glob('job*.yaml')))}-job.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(folder: Path, *arguments: str, **changes: object) -> Path:
    """Run a job to its end and return the run's folder."""
    before = set((folder / "runs").glob("*")) if (folder / "runs").exists() else set()
    assert main(["--config", str(job(folder, **changes)), *arguments]) == 0
    new = set((folder / "runs").glob("*")) - before
    return new.pop() if new else next(iter(before))


def read_metrics(run: Path) -> list[dict[str, str]]:
    """All rows of a run's CSV records, in order."""
    rows: list[dict[str, str]] = []
    for path in sorted(run.glob("csv/version_*/metrics.csv")):
        with path.open() as file:
            rows += list(csv.DictReader(file))
    return rows
