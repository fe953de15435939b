"""What `--wandb` and `--stats` of `mtp-decode generate` and `bench` keep of a command.

Knows: both options, and the environment that wandb is configured by. Refuses to know: how anything is decoded.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from decode.png import put
from decode.report import as_json
from decode.stats import DecodeStats
from decode.stream import Result
from decode.telemetry import bench_rows, decode_metrics, flat, vllm_counters
from decode.text import Prompt, plain_text
from decode.trace import TracedText, trace
from decode.wandb_media import media
from decode.wandb_run import WandbRun, start_run
from mtp.errors import UserError


def add_record_options(parser: ArgumentParser) -> None:
    """`--wandb` and `--stats`."""
    add = parser.add_argument
    add("--wandb", type=str | None, help="log to this project of W&B; offline when no key is configured")
    add("--stats", type=Path | None, help="write the statistics here (.json), under vLLM's names as well as ours")


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


class Record:
    """A context around a command: inside it, `start`, then what was decoded, then `end`. Without the options all of it
    does nothing.

    Raises UserError, before anything is decoded, for a place or project that cannot be.
    """

    def __init__(self, options: Namespace, command: str, say: Callable[[str], None] = _tell) -> None:
        self._stats: Path | None = options.stats
        self._project: str | None = options.wandb
        self._command = command
        self._say = say
        self._run: WandbRun | None = None
        self._total: DecodeStats | None = None
        self._texts: list[TracedText] = []
        self._check()

    def _check(self) -> None:
        path, project = self._stats, self._project
        if path is not None and (path.suffix != ".json" or path.is_dir() or not path.parent.is_dir()):
            raise UserError(f"--stats is {path}; name a file that ends in .json, in a folder that exists.")
        if project is not None and (not project.strip() or "/" in project):
            raise UserError(f"--wandb is {project!r}; use the name of a project, without slashes.")

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        if self._run is not None:
            self._run.finish()

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin, with what the numbers depend on."""
        if self._project is None:
            return
        folder = Path(os.environ.get("WANDB_DIR", "."))
        self._run = start_run(self._project, None, folder, settings, os.environ, self._say, self._command)
        if self._run is not None:
            self._run.define_axis("bench/forward_ms", "bench/rows")
            self._run.define_axis("bench/speed_up", "bench/draft_length")

    def text(self, result: Result, prompt: Prompt, tokenizer: Any) -> Result:
        """Log a finished text: counts of all texts so far, as a server's counters grow."""
        if self._run is not None:
            self._total = self._total or result.stats.empty()
            self._total.merge(result.stats)
            self._texts.append(trace(result, prompt, None, plain_text(tokenizer, special=True)))
            self._run.log(decode_metrics(self._total) | flat(vllm_counters(self._total)))
        return result

    def end(self, report: Mapping[str, Any]) -> None:
        """Keep the report of the command: of `bench` the numbers, of `generate` tables of its texts."""
        if self._run is not None:
            rows = bench_rows(report) if self._total is None else [media(self._total, self._texts)]
            for row in rows:
                self._run.log(row)
        if self._stats is not None:
            write_stats(report, self._stats)


def write_stats(report: Mapping[str, Any], path: Path) -> None:
    """The whole file or none. Of texts it has the statistics and not the words."""
    document = {name: value for name, value in report.items() if name != "results"}
    document["results"] = [one.get("stats", one) for one in report["results"]]
    try:
        put((json.dumps(json.loads(as_json(document)), indent=2, ensure_ascii=False) + "\n").encode(), path)
    except OSError as error:
        raise UserError(f"--stats {path} cannot be written ({error.strerror}); choose another place.") from error
