"""What a run's folder holds, read again: the metrics over its steps, its record, its heads and its samples.

Knows: the files of `runs/<name>`, of running, killed and earlier runs too. Refuses to know: what is made of them.
"""

import csv
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp.errors import UserError
from train.run import read_record
from train.samples import Samples, read_samples
from train.summary import DECODED, MONITOR

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class History:
    """A run as its folder tells it. Whatever a file lacks is empty."""

    folder: Path
    metrics: Mapping[str, Points]
    """Of every metric the optimiser steps and values, in order of steps."""
    run: Mapping[str, Any]
    """run.json."""
    heads: Mapping[str, Any]
    """heads/config.json."""
    samples: Samples | None

    @property
    def positions(self) -> int:
        """K, as far as metrics go."""
        found = [int(key.rsplit("/", 1)[1]) for key in self.metrics if re.fullmatch(r"(val|train)/alpha/\d+", key)]
        return max(found, default=0)

    @property
    def last_step(self) -> int:
        return int(max((points[-1][0] for points in self.metrics.values()), default=0))

    @property
    def finished(self) -> bool:
        """Whether training came to its end; one that was resumed and cut has metrics of later steps than that."""
        return "tokens_trained" in self.run and self.last_step <= int(self.run.get("steps", self.last_step))

    @property
    def best(self) -> dict[str, float]:
        """Metrics of the heads on disk, with their `step`; empty without validation."""
        kept = self.run.get("best")
        if isinstance(kept, dict) and "step" in kept:
            return {key: float(value) for key, value in kept.items()}
        return self._most(MONITOR)

    @property
    def longest(self) -> dict[str, float]:
        """The validation whose decoding committed most."""
        return self._most(DECODED)

    def _most(self, key: str) -> dict[str, float]:
        finite = [point for point in self.metrics.get(key, []) if math.isfinite(point[1])]
        if not finite:
            return {}
        step = max(finite, key=lambda point: point[1])[0]
        return {"step": step, **{name: dict(points)[step] for name, points in self.at(step).items()}}

    def at(self, step: float) -> dict[str, Points]:
        """The metrics of validation that were recorded at a step."""
        found = {key: points for key, points in self.metrics.items() if key.startswith(("val/", "decode/"))}
        return {key: points for key, points in found.items() if step in dict(points)}


def read_run(folder: Path) -> History:
    """UserError unless the folder is one of a run."""
    metrics = read_metrics(folder)
    if not metrics and not (folder / "run.json").is_file():
        told = "has neither run.json nor csv/version_*/metrics.csv" if folder.is_dir() else "is no folder"
        raise UserError(f"{folder} {told}; name the folder of a training run, such as runs/demo.")
    return History(folder, metrics, read_record(folder), _heads(folder), read_samples(folder))


def read_metrics(folder: Path) -> dict[str, Points]:
    """All metrics in csv/version_*/metrics.csv. Each sitting of a run has a version; what a later one says of a step
    holds. A cell that is no number, as at the end of a file that is being written, is left out."""
    found: dict[str, dict[float, float]] = {}
    versions = sorted(folder.glob("csv/version_*/metrics.csv"), key=lambda path: _number(path.parent.name))
    for path in versions:
        with path.open(encoding="utf-8", errors="replace", newline="") as file, suppress(csv.Error):
            for row in csv.DictReader(file):
                _take(row, found)
    return {key: sorted(values.items()) for key, values in sorted(found.items())}


def _take(row: Mapping[str | None, Any], found: dict[str, dict[float, float]]) -> None:
    step = _value(row.get("step"))
    if step is None or not math.isfinite(step):
        return
    for key, cell in row.items():
        value = _value(cell)
        if key not in (None, "step", "epoch") and value is not None:
            found.setdefault(str(key), {})[step] = value


def _value(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _number(name: str) -> int:
    digits = name.rsplit("_", 1)[1]
    return int(digits) if digits.isdigit() else -1


def _heads(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "heads" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
