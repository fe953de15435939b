"""Charts as PNG, for slides and places that take no HTML: the same data as the page's (`decode.charts`).

Knows: matplotlib. Refuses to compute: figures, ticks and places of names come from `decode.charts`.
"""

import warnings
from collections.abc import Sequence
from io import BytesIO
from math import ceil
from typing import TYPE_CHECKING

from decode.charts import Bars, Chart, Lines, brief, spread, ticks, told, whole_ticks, x_range, y_range
from decode.page_style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT, _PALE_TEXT, _LINE, _GRID = "#1a202c", "#4a5568", "#a0aec0", "#e2e8f0"
_MARKERS = ("o", "s", "D", "^", "v", "P")
_DASHES = ("-", "--", ":", "-.", (0, (4, 2)), (0, (1, 3)))
_HATCHES = ("", "///", "---", "xxx", "|||", "\\\\\\")
_WIDTH, _PANEL, _HEAD = 6.0, 3.7, 0.95  # inches: of a panel, its height, and of the title


def draw(charts: Sequence[Chart], title: str, under: str) -> bytes:
    """The charts, two in a row, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = ceil(len(charts) / columns)
    width, height = max(_WIDTH * columns, 8.0), _PANEL * rows + _HEAD
    figure = Figure(figsize=(width, height), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.25 / width, 1 - 0.42 / height, title, size=18, weight="bold", color=_TEXT, parse_math=False)
    figure.text(0.25 / width, 1 - 0.72 / height, under, size=11, color=_PALE_TEXT, parse_math=False)
    for index, chart in enumerate(charts):
        left, top = index % columns * width / columns, _HEAD + index // columns * _PANEL
        _panel(figure.add_axes((0, 0, 1, 1)), chart, left, height - top, width / columns, (width, height))
    image = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a category may have any name
        figure.savefig(image, format="png")
    return image.getvalue()


def _panel(axes: "Axes", chart: Chart, left: float, top: float, width: float, whole: tuple[float, float]) -> None:
    """Place and fill one panel; all in inches, from the lower left corner of the figure."""
    names = 1.55 if isinstance(chart, Lines) else 0.7  # beside the plot
    before = 0.75 if isinstance(chart, Lines) else 1.75
    box = (left + before, top - _PANEL + 0.55, width - before - names, _PANEL - 1.25)
    axes.set_position((box[0] / whole[0], box[1] / whole[1], box[2] / whole[0], box[3] / whole[1]))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    axes.tick_params(length=0, labelsize=9.5, colors=_TEXT)
    place = (0.25 + left - box[0]) / box[2]
    axes.text(
        place,
        1 + 0.42 / box[3],
        chart.title,
        transform=axes.transAxes,
        size=12.5,
        weight="bold",
        color=_TEXT,
        parse_math=False,
    )
    axes.text(
        place,
        1 + 0.2 / box[3],
        _first(chart.about),
        transform=axes.transAxes,
        size=9.5,
        color=_PALE_TEXT,
        parse_math=False,
    )
    _lines(axes, chart) if isinstance(chart, Lines) else _bars(axes, chart)


def _first(about: str, most: int = 88) -> str:
    """The first sentence, or as much as has room."""
    sentence = about.split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= most else sentence[: most - 1] + "…"


def _lines(axes: "Axes", chart: Lines) -> None:
    (x0, x1), (y0, y1) = x_range(chart), y_range(chart)
    axes.set_xlim(x0 - 0.02 * (x1 - x0), x1 + 0.02 * (x1 - x0))
    axes.set_ylim(y0, y1)
    marks, steps = ticks(y0, y1), whole_ticks(x0, x1)
    axes.set_yticks(marks, [told(tick) for tick in marks])
    axes.set_xticks(steps, [told(tick) for tick in steps])
    axes.set_xlabel(chart.x_name, size=9.5, color=_PALE_TEXT, parse_math=False)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.set_axisbelow(True)
    if chart.level is not None:
        axes.axhline(chart.level[0], color=_LINE, linewidth=1.5)
        axes.text(x0, chart.level[0], chart.level[1], size=9, color=_PALE_TEXT, va="bottom", parse_math=False)
    if chart.mark is not None and x0 <= chart.mark[0] <= x1:
        axes.axvline(chart.mark[0], color=_TEXT, linewidth=1, linestyle=(0, (4, 3)))
        side = "left" if chart.mark[0] < (x0 + x1) / 2 else "right"
        axes.annotate(
            chart.mark[1], (chart.mark[0], y1), (4 if side == "left" else -4, -2), va="top", ha=side, size=9.5,
            weight="bold", color=_TEXT, textcoords="offset points", parse_math=False,
        )  # fmt: skip
    seen = [(index, line) for index, line in enumerate(chart.lines) if line.finite]
    for index, line in seen:
        look = index % len(_MARKERS)
        xs, ys = zip(*line.points, strict=True)
        every = 1 if len(xs) <= 40 else len(xs) // 8
        axes.plot(
            xs, ys, color=LIGHT[look], linestyle=_DASHES[look], marker=_MARKERS[look], markevery=every,
            linewidth=2, markersize=6, markeredgecolor="white", markeredgewidth=0.6,
        )  # fmt: skip
    places = spread([line.finite[-1][1] for _, line in seen], 0.075 * (y1 - y0), y0, y1)
    for (index, line), y in zip(seen, places, strict=True):
        x = x1 + 0.06 * (x1 - x0)
        look = index % len(_MARKERS)
        axes.plot([x], [y], marker=_MARKERS[look], color=LIGHT[look], markersize=6, clip_on=False)
        axes.text(
            x + 0.04 * (x1 - x0), y, f"{line.name} {brief(line.finite[-1][1])}".strip(), size=10, color=_TEXT,
            va="center", parse_math=False,
        )  # fmt: skip


def _bars(axes: "Axes", chart: Bars) -> None:
    looks = {name: index for index, name in enumerate(chart.names)}
    headed = len(looks) > 1
    y, names, places = 0.0, [], []
    for group in chart.groups:
        if headed and group:
            axes.text(0, y + 0.1, f" {group}", size=9.5, weight="bold", color=_TEXT, va="center", parse_math=False)
            y += 1
        for bar in (bar for bar in chart.bars if bar.group == group):
            look = looks[bar.name] % len(LIGHT)
            value = bar.value if bar.value == bar.value else 0.0
            face = LIGHT[look] if not look else "white"
            axes.barh(y, value, height=0.72, facecolor=face, edgecolor=LIGHT[look], hatch=_HATCHES[look], linewidth=1)
            beside = f" {bar.told or brief(bar.value)}"
            axes.text(value, y, beside, size=9.5, color=_TEXT, va="center", parse_math=False)
            names.append(bar.name if headed else group)
            places.append(y)
            y += 1
        y += 0.4 if headed else 0.0
    shown = [name if len(name) <= 22 else name[:21] + "…" for name in names]
    axes.set_yticks(places, shown)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_xticks([])
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(_LINE)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, chart.longest)
    axes.set_ylim(y - 0.4, -0.6)
