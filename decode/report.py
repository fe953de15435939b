"""What a person sees after decoding: small tables and a progress bar.

Knows: rich, and whether a stream is a terminal. Refuses to measure.
"""

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from decode.evidence import Finding
from decode.stats import DecodeStats


class Screen(Console):
    """A console that leaves a reader who has seen enough to the program, in place of ending it with an error."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def show_stats(stats: DecodeStats) -> None:
    """Statistics of a run on stderr: a table on a terminal, one line otherwise."""
    if not stats.lossless:
        sys.stderr.write(f"lossy: the rule {stats.rule} does not keep the base's distribution\n")
    rate = stats.committed / max(stats.total_seconds, 1e-9)
    rows = {
        "acceptance length": f"{stats.accept_len:.2f} tokens per step ({_how(stats)})",
        "tokens": f"{stats.committed} in {stats.steps} steps, {rate:.1f} per second",
    }
    if stats.draft_length:
        shares = _shares(stats.accepted_per_position)
        rows["accepted"] = f"{stats.accepted} of {stats.drafted} drafts; per position {shares}"
        rows["alpha"] = _shares(stats.alpha)
    rows["seconds"] = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in stats.seconds.items())
    if stats.unusable_q:
        rows["unusable q"] = (
            f"{stats.unusable_q} steps drafted less: q was NaN, infinite, or empty after the processors"
        )
    if stats.undrafted_texts:
        rows["no drafts"] = f"{stats.undrafted_texts} texts, because a processor may keep state"
    if stats.residual_empty:
        rows["empty residual"] = f"{stats.residual_empty} steps drew the recovered token from the base (rounding)"
    if not sys.stderr.isatty():
        sys.stderr.write("; ".join(f"{name}: {value}" for name, value in rows.items()) + "\n")
        return
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Screen(stderr=True).print(table)


def _how(stats: DecodeStats) -> str:
    shape = f", tree {stats.tree}" if stats.tree else ""
    return f"K = {stats.draft_length}, {stats.rule}{shape}"


def show_bench(report: dict[str, Any], to_stderr: bool) -> None:
    """The table of `bench`, with the settings that belong to the numbers."""
    title = (
        f"{report['base']}, {report['hardware']}, {report['threads']} threads, {report['dtype']}, "
        f"K = {report['draft_length']}, {report['verify']}, temperature {report['temperature']:g}, "
        f"{report['num_prompts']} prompts"
    )
    table = Table(title=title, title_justify="left")
    for column in ("", "tokens/s", "acceptance length", "rule's share", "tokens", "mtp / this"):
        table.add_column(column, justify="right" if column else "left")
    for side in report["results"]:
        length = f"{side['accept_len']:.2f}" if "accept_len" in side else "-"
        ratio = f"{report['ratios'][side['name']]:.2f}×" if side["name"] in report["ratios"] else ""
        share = f"{side['rule_share']:.1%}" if "rule_share" in side else "-"
        table.add_row(side["name"], f"{side['tok_per_s']:.1f}", length, share, str(side["tokens"]), ratio)
    screen = Screen(stderr=to_stderr)
    screen.print(table)
    for side in report["results"]:
        if side["name"] == "mtp" and "accept_len_by_category" in side:
            lengths = ", ".join(f"{name} {value:.2f}" for name, value in side["accept_len_by_category"].items())
            mean = side["accept_len_category_mean"]
            screen.print(f"acceptance length, mean over categories {mean:.2f}: {lengths}", soft_wrap=True)


def show_findings(findings: Sequence[Finding], title: str, seconds: float, to_stderr: bool) -> None:
    """The table of `check`, and what its outcome means."""
    table = Table(title=title, title_justify="left")
    for column in ("check", "", "measured"):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.name, "[green]passed[/]" if finding.passed else "[red]FAILED[/]", finding.text)
    failed = sum(not finding.passed for finding in findings)
    console = Screen(stderr=to_stderr, highlight=False)
    console.print(table)
    verdict = "decoding is lossless as far as these checks see" if not failed else f"{failed} of {len(findings)} failed"
    console.print(
        f"{verdict} ({seconds:.0f} s). Each chi-square test rejects an exact decoder for less than two of 10,000 "
        "seeds; a negative control must find a fault that was built in."
    )


@contextmanager
def tracked(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """A progress bar while stdout is a terminal; yields what to call after each unit."""
    columns = (TextColumn(unit), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Screen(stderr=True), disable=not sys.stdout.isatty(), transient=True) as bar:
        task = bar.add_task(unit, total=total)
        yield lambda: bar.advance(task)


def _shares(values: list[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def as_json(document: dict[str, Any]) -> str:
    """One line of JSON; a number that JSON has no word for becomes a text, as in "inf"."""
    return json.dumps(_spelt(document), ensure_ascii=False, allow_nan=False)


def _spelt(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelt(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelt(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
