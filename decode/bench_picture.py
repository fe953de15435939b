"""The picture of `bench`: speed over plain decoding's against K, as the costs of a step predict it and as measured.

Knows: matplotlib, and when there is nothing to draw. Refuses to compute: all figures come from the report of
`decode.bench`.
"""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decode.png import check_path
from decode.request import Request
from mtp.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MODEL, _MEASURED = "#2b6cb0", "#dd7a1f"
_TEXT, _PALE_TEXT, _LINE, _GRID = "#1a202c", "#4a5568", "#a0aec0", "#e2e8f0"


def check_plot(path: Path, request: Request, against: Sequence[str], batch_size: int = 1) -> None:
    """UserError unless this run can be drawn, and there."""
    check_path(path, "--plot")
    if "plain" not in against:
        named = ",".join(against) or "empty"
        raise UserError(f"--plot draws the speed-up over plain, but --against is {named}; add plain to it.")
    if batch_size > 1:
        raise UserError(f"--plot draws single texts, but --batch-size is {batch_size}; leave one of them out.")
    if request.tree is not None:
        raise UserError(f"--plot draws chains of K drafts, but --tree is {request.tree}; leave one of them out.")
    if request.lookup:
        told = f"--plot draws K drafts of the heads, but --lookup is {request.lookup}"
        raise UserError(f"{told}; leave one of them out.")
    if request.draft_length in (0, "auto"):
        told = f"--plot draws K drafts, from 1 on, but --draft-length is {request.draft_length}"
        raise UserError(f"{told}; use a number from 1 on.")


def draw(report: dict[str, Any]) -> bytes:
    """The picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.6), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.075, right=0.97, top=0.71, bottom=0.085)
    figure.text(0.03, 0.925, "Speed-up over plain decoding", size=19, weight="bold", color=_TEXT)
    for y, line in zip((0.87, 0.823), _about(report), strict=True):
        figure.text(0.03, y, line, size=11.5, color=_PALE_TEXT, parse_math=False)
    for x, name, colour in ((0.03, "● as the costs of a step predict", _MODEL), (0.42, "◆ measured", _MEASURED)):
        figure.text(x, 0.765, name, size=12, weight="bold", color=colour)
    _draw_curve(axes, report["cost_model"]["speed_up"], report["draft_length"], report["cost_model"]["measured"])
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _about(report: dict[str, Any]) -> tuple[str, str]:
    base = Path(report["base"]).name
    base = base if len(base) <= 40 else base[:39] + "…"
    where = f"{base}, {report['hardware']}, {report['threads']} threads, {report['dtype']}"
    how = f"{report['verify']}, temperature {report['temperature']:g}, {report['num_prompts']} prompts; without prefill"
    return where, how


def _draw_curve(axes: "Axes", expected: list[float], drafts: int, measured: float) -> None:
    ks = range(1, len(expected) + 1)
    low, top = min(1.0, measured, *expected), max(1.0, measured, *expected)
    room, last = 0.16 * max(top - low, 0.1), max(len(expected), drafts)
    span = max(1, last - 1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    axes.tick_params(length=0, labelsize=11, colors=_TEXT)
    axes.set_ylim(low - room, top + room)
    axes.set_xlim(1 - 0.08 * span, last + 0.2 * span)
    axes.set_xticks(range(1, last + 1), [f"K = {k}" for k in range(1, last + 1)])
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    axes.axhline(1, color=_LINE, linewidth=1.5)
    axes.text(last + 0.2 * span, 1, "plain decoding", color=_PALE_TEXT, size=11, va="bottom", ha="right")
    axes.plot(ks, expected, "o-", color=_MODEL, linewidth=2.2, markersize=7.5, markeredgecolor="white")
    axes.plot([drafts], [measured], "D", color=_MEASURED, markersize=9, markeredgecolor="white")
    paper: dict[str, Any] = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
    for k, value in zip(ks, expected, strict=True):
        above = k != drafts or value >= measured  # away from the measured point
        how: dict[str, Any] = {"va": "bottom" if above else "top", "ha": "center", "bbox": paper, "zorder": 2.2}
        place = (0, 9 if above else -9)
        axes.annotate(f"{value:.2f}", (k, value), place, textcoords="offset points", color=_MODEL, size=11, **how)
    how = {"va": "center", "weight": "bold", "size": 12}
    axes.annotate(f"{measured:.2f}", (drafts, measured), (10, 0), textcoords="offset points", color=_MEASURED, **how)
