"""What a person sees after decoding: small tables and a progress bar.

Knows: rich, and whether a stream is a terminal. Refuses to measure.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from decode.stats import DecodeStats


def show_stats(stats: DecodeStats) -> None:
    """Statistics of a run on stderr: a table on a terminal, one line otherwise."""
    rate = stats.committed / max(stats.total_seconds, 1e-9)
    rows = {
        "acceptance length": f"{stats.accept_len:.2f} tokens per step (K = {stats.draft_length}, {stats.rule})",
        "tokens": f"{stats.committed} in {stats.steps} steps, {rate:.1f} per second",
    }
    if stats.draft_length:
        shares = _shares(stats.accepted_per_position)
        rows["accepted"] = f"{stats.accepted} of {stats.drafted} drafts; per position {shares}"
        rows["alpha"] = _shares(stats.alpha)
    rows["seconds"] = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in stats.seconds.items())
    if stats.nonfinite_drafts:
        rows["not finite"] = f"{stats.nonfinite_drafts} steps drafted less because the heads returned NaN or infinity"
    if stats.residual_empty:
        rows["empty residual"] = f"{stats.residual_empty} steps drew the recovered token from the base (rounding)"
    if not sys.stderr.isatty():
        sys.stderr.write("; ".join(f"{name}: {value}" for name, value in rows.items()) + "\n")
        return
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(stderr=True).print(table)


def show_bench(report: dict[str, Any], to_stderr: bool) -> None:
    """The table of `bench`, with the settings that belong to the numbers."""
    title = (
        f"{report['base']}, {report['hardware']}, {report['threads']} threads, {report['dtype']}, "
        f"K = {report['draft_length']}, temperature {report['temperature']:g}, {report['num_prompts']} prompts"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "tokens/s", "acceptance length", "tokens", "mtp is faster by"):
        table.add_column(column, justify="right" if column else "left")
    for side in report["results"]:
        length = f"{side['accept_len']:.2f}" if "accept_len" in side else "-"
        ratio = f"{report['ratios'][side['name']]:.2f}×" if side["name"] in report["ratios"] else ""
        table.add_row(side["name"], f"{side['tok_per_s']:.1f}", length, str(side["tokens"]), ratio)
    Console(stderr=to_stderr).print(table)


@contextmanager
def tracked(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """A progress bar while stdout is a terminal; yields what to call after each unit."""
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stdout.isatty(), transient=True) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda: bar.advance(task)


def _shares(values: list[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)
