"""The page of `bench`, and its picture: acceptance, where drafts fail, and what speed is made of.

Knows: the report of `decode.bench`, and under which headings it is shown: those of a training run's page. Refuses to
measure.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode import chart_png, failures
from decode.charts import Bar, Bars, Chart, Line, Lines
from decode.page import Cell, Page, Section, Table, Tile, all_charts, render
from decode.png import check_path, write
from decode.trace import TracedText
from mtp.errors import UserError

_OPTION = "--report"


def check_report(path: Path) -> None:
    """UserError unless a page and a picture beside it can be written there."""
    if path.suffix.lower() not in (".html", ".htm") or path.is_dir():
        raise UserError(f"{_OPTION} is {path}; name a file that ends in .html.")
    check_path(path.with_suffix(".png"), _OPTION)


def write_report(report: dict[str, Any], texts: Sequence[TracedText], path: Path, command: Sequence[str]) -> list[Path]:
    """Write the page and the picture; returns both paths. UserError where that cannot be done."""
    page = bench_page(report, texts, command)
    write(render(page).encode("utf-8"), path, _OPTION)
    picture = path.with_suffix(".png")
    write(chart_png.draw(all_charts(page.sections), page.title, page.subtitle), picture, _OPTION)
    return [path, picture]


def bench_page(report: dict[str, Any], texts: Sequence[TracedText], command: Sequence[str] = ()) -> Page:
    """All that the report and the texts of mtp tell, as a page."""
    lengths = f"K {'up to' if report['draft_length_auto'] else '='} {report['draft_length']}"
    prompts = failures.counted(report["num_prompts"], "prompt")
    how = f"{lengths}, {report['verify']}, temperature {report['temperature']:g}, {prompts}"
    lossy = () if report["lossless"] else (f"The rule {report['verify']} does not keep the base's distribution.",)
    where = (
        f"{report['base']}, {report['hardware']}, {failures.counted(report['threads'], 'thread')}, {report['dtype']}"
    )
    return Page(
        title=f"Bench of {Path(report['heads']).name}" if report["heads"] else "Bench",
        subtitle=f"{where}; {how}",
        notices=lossy,
        tiles=tuple(_tiles(report)),
        facts=tuple(_facts(report)),
        commands=(("Measured by", shlex.join(["mtp-decode", *command])),) if command else (),
        sections=(_lengths(report), _positions(report, texts), _failures(report, texts), _speed(report, texts)),
    )


def _tiles(report: dict[str, Any]) -> list[Tile]:
    ours = report["results"][0]
    tiles = [
        Tile("τ decoded", f"{ours['accept_len']:.2f}", "tokens per step; plain decoding is 1"),
        Tile("mtp", f"{ours['tok_per_s']:.1f}", "tokens per second, prefill included"),
    ]
    return tiles + [Tile(f"mtp / {name}", f"{ratio:.2f}×", "in tokens per second") for name, ratio in _ratios(report)]


def _ratios(report: dict[str, Any]) -> list[tuple[str, float]]:
    return list(report["ratios"].items())


_SHOWN_ELSEWHERE = {
    "results",
    "ratios",
    "paired_ratios",
    "costs",
    "cost_model",
    "versions",
    "lossless",
    "draft_length_auto",
}


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Every setting of the report, by its own name."""
    own = {name: value for name, value in report.items() if not name.startswith("spec_decode_")}  # the same for servers
    facts = {name: value for name, value in own.items() if name not in _SHOWN_ELSEWHERE and value is not None}
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return [(name.replace("_", " "), str(value)) for name, value in facts.items()]


def _lengths(report: dict[str, Any]) -> Section:
    ours = report["results"][0]
    by_category = ours.get("accept_len_by_category", {})
    bars = [Bar("all prompts", "τ", ours["accept_len"])]
    bars += [Bar(name, "τ", length) for name, length in sorted(by_category.items(), key=lambda item: -item[1])]
    about = f"Tokens per step. From 1 (no draft is kept) to {report['draft_length'] + 1} (all are)."
    chart = Bars("Acceptance length", about, tuple(bars), most=report["draft_length"] + 1)
    told = "Acceptance length τ is how many tokens a step commits: its accepted drafts, and one more."
    return Section("Acceptance length", told, (chart,))


def _positions(report: dict[str, Any], texts: Sequence[TracedText]) -> Section:
    ours, counted = report["results"][0], failures.kept_by_position(texts)
    bars: list[Bar] = []
    for k, (alpha, cumulative) in enumerate(zip(ours["alpha"], ours["accepted_per_position"], strict=True), start=1):
        bars.append(Bar(f"draft {k}", "α", alpha))
        if counted.get(k):
            bars.append(Bar(f"draft {k}", "conditional", counted[k][0] / counted[k][1]))
        bars.append(Bar(f"draft {k}", "cumulative", cumulative))
    about = "Conditional: kept, of those whose predecessors were. Cumulative: of the steps, those that kept drafts 1…k."
    charts = (Bars("Drafts kept", about, tuple(bars), most=1),) if bars else ()
    told = "αₖ is the chance Σ min(p, q) that draft k is kept, given that all before it were."
    return Section("Acceptance per draft position", told if bars else "Nothing was drafted.", charts)


def _failures(report: dict[str, Any], texts: Sequence[TracedText]) -> Section:
    return failures.section(texts, f"In {failures.counted(report['num_prompts'], 'prompt')} that mtp decoded here.")


def _speed(report: dict[str, Any], texts: Sequence[TracedText]) -> Section:
    ours = report["results"][0]
    bars, seconds = failures.phases(ours["seconds"], ours["steps"])
    items: list[Chart | Table] = [_rates(report), bars, _rows(report), *_by_drafts(report)]
    items += [failures.committed(texts)] if texts else []
    about = "All sides decode the same prompts with the same settings, warmed up and taking turns."
    return Section("Speed", about, (*items, _sides(report), seconds, _costs(report)))


def _rates(report: dict[str, Any]) -> Bars:
    bars = tuple(Bar(side["name"], "rate", side["tok_per_s"]) for side in report["results"])
    return Bars("Tokens per second", "Of all prompts together, prefill included.", bars)


def _rows(report: dict[str, Any]) -> Lines:
    costs = report["costs"]
    points = tuple((float(rows), 1e3 * spent) for rows, spent in enumerate(costs["forward_seconds"], start=1))
    about = f"Milliseconds of a forward of the base, behind {costs['context']} tokens, measured alone."
    return Lines("Cost per row", about, (Line("forward", points),), "rows", 0.0)


def _by_drafts(report: dict[str, Any]) -> list[Lines]:
    model = report["cost_model"]
    if model is None:
        return []
    expected = tuple((float(k), value) for k, value in enumerate(model["speed_up"], start=1))
    measured = ((float(report["draft_length"]), model["measured"]),)
    about = (
        "Times the speed of plain decoding, without prefill: what costs and drafts kept predict, and what was measured."
    )
    lines = (Line("predicted", expected), Line("measured", measured))
    return [Lines("Speed-up by K", about, lines, "draft length K", level=(1.0, "plain decoding"))]


def _sides(report: dict[str, Any]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for side in report["results"]:
        name, spread = side["name"], side["tok_per_s_spread"]
        paired = report["paired_ratios"].get(name, {})
        rows.append(
            (name, side["tok_per_s"], spread["median"], spread["min"], spread["max"], report["ratios"].get(name),
             paired.get("median"), paired.get("min"), paired.get("max"), side.get("accept_len"), side["tokens"],
             side["wall_seconds"])
        )  # fmt: skip
    speeds = ("tokens/s", "median turn", "slowest", "fastest")
    ratios = ("mtp / this", "median turn", "least", "most")
    columns = ("", *speeds, *ratios, "τ", "tokens", "seconds")
    return Table(
        "Sides",
        "Over all prompts, and over single turns: a prompt, or as many as are decoded at a time.",
        columns,
        tuple(rows),
    )


def _costs(report: dict[str, Any]) -> Table:
    costs = report["costs"]
    named = {
        "one draft": (costs["draft_seconds"], 1e3, "ms"),
        "weights that a forward reads": (costs["weight_bytes"], 1e-6, "MB"),
        "weights read by a forward over one row": (costs["forward_bandwidth"], 1e-9, "GB/s"),
        "memory read by this machine": (costs["read_bandwidth"], 1e-9, "GB/s"),
        "memory floor of a forward": (costs["memory_floor_seconds"], 1e3, "ms"),
        "a step of mtp, over that floor": (costs["step_over_floor"], 1, "×"),
    }
    rows = tuple((name, value * factor, unit) for name, (value, factor, unit) in named.items() if value is not None)
    return Table("Costs", "Parts of a step, each measured alone.", ("", "value", "unit"), rows)
