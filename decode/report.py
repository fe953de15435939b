"""What a person sees after decoding: small tables.

Knows: rich, and whether a stream is a terminal. Refuses to measure.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from decode.evidence import Finding
from decode.stats import DecodeStats

_ANY = 1000  # columns: more than any table takes


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
    if stats.most_drafts:
        shares = _shares(stats.accepted_per_position)
        rows["accepted"] = f"{stats.accepted} of {stats.drafted} drafts; per position {shares}"
        rows["alpha"] = _shares(stats.alpha)
    if stats.lookup:
        rows["lookup"] = f"{stats.lookup_accepted} of {stats.lookup_drafted} drafts kept, in {stats.lookup_steps} steps"
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
    lookup = f", lookup {stats.lookup}" if stats.lookup else ""
    return f"K = {stats.draft_length}{lookup}, {stats.rule}{shape}"


def show_bench(report: dict[str, Any], to_stderr: bool) -> None:
    """The table of `bench` with the settings that belong to the numbers, and under it what a step is made of."""
    screen = Screen(stderr=to_stderr)
    tables = [_bench_table(report, spreads) for spreads in (True, False)]
    widths = [Measurement.get(screen, screen.options.update(max_width=_ANY), table).maximum for table in tables]
    if not screen.is_terminal:  # a line stays one where programs read it
        screen.width = max(screen.width, widths[0])
    screen.print(_bench_title(report), soft_wrap=not screen.is_terminal)
    screen.print(tables[0] if widths[0] <= screen.width else tables[1])
    for line in _bench_notes(report):
        screen.print(line, soft_wrap=not screen.is_terminal)


def _bench_title(report: dict[str, Any]) -> str:
    lengths = f"K {'up to' if report['draft_length_auto'] else '='} {report['draft_length']}"
    lookup = f"lookup {report['lookup']}, " if report["lookup"] else ""
    return (
        f"{report['base']}, {report['hardware']}, {report['threads']} threads, {report['dtype']}, {lengths}, "
        f"{lookup}{report['verify']}, temperature {report['temperature']:g}, {_turns(report)}"
    )


def _bench_table(report: dict[str, Any], spreads: bool) -> Table:
    """With or without what needs room: the medians and ranges over the turns."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    shown = [True, spreads, True, True, True, spreads]
    for column in compress(("tokens/s", "by turn", "acceptance\nlength", "tokens", "mtp /\nthis", "by turn"), shown):
        table.add_column(column, justify="right", no_wrap=True)
    for side in report["results"]:
        name, ratio, paired = side["name"], "", ""
        length = f"{side['accept_len']:.2f}" if "accept_len" in side else "-"
        if name in report["ratios"]:
            ratio, paired = f"{report['ratios'][name]:.2f}×", _spread(report["paired_ratios"][name], ".2f", "×")
        rates = _spread(side["tok_per_s_spread"], ".1f")
        row = f"{side['tok_per_s']:.1f}", rates, length, str(side["tokens"]), ratio, paired
        table.add_row(name, *compress(row, shown))
    return table


def _turns(report: dict[str, Any]) -> str:
    at_once = "" if report["batch_size"] == 1 else f", {report['batch_size']} at a time"
    return f"{report['num_prompts']} prompts{at_once}"


def _spread(values: dict[str, float], form: str, unit: str = "") -> str:
    """The median, and the range in brackets."""
    return f"{values['median']:{form}}{unit} ({values['min']:{form}}–{values['max']:{form}})"


def _bench_notes(report: dict[str, Any]) -> Iterator[str]:
    """What stands under the table of `bench`."""
    ours, costs = report["results"][0], report["costs"]
    turn = "prompt" if report["batch_size"] == 1 else "batch"
    yield f"by turn: median (range) over the turns; a turn is a {turn}, and a ratio that of two sides on the same one"
    phases = {name: ours["seconds"][name] / max(1, ours["steps"]) for name in ("verify", "draft", "rule", "other")}
    total = max(sum(phases.values()), 1e-12)
    base, draft, rule, other = (f"{seconds / total:.1%}" for seconds in phases.values())
    share = "" if report["batch_size"] == 1 else " (a text's share of a batch's)"
    yield (
        f"step of mtp{share}: {1e3 * ours['step_seconds']:.1f} ms; the base's forward {base}, the rest "
        f"{ours['overhead_share']:.1%}: drafting {draft}, rule {rule}, other {other}"
    )
    rows = costs["forward_seconds"]
    times = " ".join(f"{1e3 * seconds:.1f}" for seconds in rows)
    yield f"forward over 1…{len(rows)} rows behind {costs['context']} tokens, alone: {times} ms"
    if costs["draft_seconds"] is not None:
        yield f"one draft, alone: {1e3 * costs['draft_seconds']:.2f} ms"
    yield (
        f"weights of {costs['weight_bytes'] / 1e6:.0f} MB, read at {costs['forward_bandwidth'] / 1e9:.1f} GB/s by a "
        f"forward over one row; this machine reads {costs['read_bandwidth'] / 1e9:.1f} GB/s"
    )
    floor = f"{1e3 * costs['memory_floor_seconds']:.1f} ms"
    over = costs["step_over_floor"]
    yield f"memory floor of a forward: {floor}" + (
        "" if over is None else f"; a step of mtp takes {over:.2f} times that"
    )
    if report["vllm"]:
        versions = ", ".join(f"{name} {version}" for name, version in report["vllm"].items())
        yield f"vllm: plain decoding in an environment of its own, {versions}"
    if "accept_len_by_category" in ours:
        lengths = ", ".join(f"{name} {value:.2f}" for name, value in ours["accept_len_by_category"].items())
        yield f"acceptance length, mean over categories {ours['accept_len_category_mean']:.2f}: {lengths}"


def show_findings(findings: Sequence[Finding], title: str, seconds: float, to_stderr: bool, missing: int = 0) -> None:
    """The table of `check`, and what its outcome means; `missing` checks were not made."""
    table = Table(title=title, title_justify="left")
    for column in ("check", "", "measured"):
        table.add_column(column)
    for finding in findings:
        table.add_row(finding.name, "[green]passed[/]" if finding.passed else "[red]FAILED[/]", finding.text)
    failed = sum(not finding.passed for finding in findings)
    console = Screen(stderr=to_stderr, highlight=False)
    console.print(table)
    verdict = "decoding is lossless as far as these checks see" if not failed else f"{failed} of {len(findings)} failed"
    if missing:
        verdict = f"{len(findings)} checks made, {failed} of them failed; {missing} are missing"
    console.print(
        f"{verdict} ({seconds:.0f} s). Each chi-square test rejects an exact decoder for less than two of 10,000 "
        "seeds; a negative control must find a fault that was built in."
    )


def _shares(values: list[float]) -> str:
    return " / ".join(f"{value:.2f}" for value in values)


def as_json(document: dict[str, Any]) -> str:
    """One line of JSON; a number that JSON has no word for becomes a text, as in "inf".

    In ASCII where stdout cannot hold more: the escapes of a stream are not those of JSON.
    """
    narrow = not (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")
    return json.dumps(spelt(document), ensure_ascii=narrow, allow_nan=False)


def spelt(value: Any) -> Any:
    """With texts in the place of numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: spelt(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spelt(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
