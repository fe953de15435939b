"""Charts as PNG, for slides and places that take no HTML: the very shapes of the page's charts.

Knows: matplotlib. Refuses to know: where shapes stand (`decode.layout`) and what they mean.
"""

import warnings
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from decode.charts import Chart
from decode.layout import DASHES, WIDTH, Box, Marker, Path, PathKind, Shape, Text, TextKind, place
from decode.page_style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEXT, _PALE_TEXT, _LINE, _GRID = "#1a202c", "#4a5568", "#a0aec0", "#e2e8f0"
_UNIT = 1 / 72  # inches: a unit of the layout is a point
_DPI = 110
_MARGIN, _HEAD, _CAPTION, _BETWEEN = 18.0, 62.0, 38.0, 26.0  # units
_PATHS: dict[PathKind, dict[str, Any]] = {
    "grid": {"color": _GRID, "linewidth": 1},
    "axis": {"color": _LINE, "linewidth": 1},
    "level": {"color": _LINE, "linewidth": 1.5},
    "mark": {"color": _TEXT, "linewidth": 1, "linestyle": (0, (4, 3))},
    "lead": {"color": _LINE, "linewidth": 0.8},
    "line": {"linewidth": 2},
}
_TEXTS: dict[TextKind, dict[str, Any]] = {
    "tick": {"color": _PALE_TEXT, "size": 9.5},
    "name": {"color": _TEXT, "size": 10},
    "strong": {"color": _TEXT, "size": 10, "weight": "bold"},
}
_MARKERS = ("o", "s", "D", "^", "v", "P")
_HATCHES = ("", "////", "----", "xxxx", "||||", "\\\\\\\\")
_ANCHORS = {"start": "left", "middle": "center", "end": "right"}


def draw(charts: Sequence[Chart], title: str, under: str) -> bytes:
    """The charts, two in a row, as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    placed = [(chart, *place(chart)) for chart in charts]
    rows = [placed[index : index + 2] for index in range(0, len(placed), 2)]
    width = 2 * WIDTH + 3 * _MARGIN
    height = _HEAD + sum(_CAPTION + _BETWEEN + max(tall for _, _, tall in row) for row in rows)
    figure = Figure(figsize=(width * _UNIT, height * _UNIT), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    _write(axes, _MARGIN, 24, title, size=17, weight="bold", color=_TEXT)
    _write(axes, _MARGIN, 45, under, size=10.5, color=_PALE_TEXT)
    top = _HEAD
    for row in rows:
        for column, (chart, shapes, _) in enumerate(row):
            left = _MARGIN + column * (WIDTH + _MARGIN)
            _write(axes, left, top + 8, chart.title, size=11.5, weight="bold", color=_TEXT)
            _write(axes, left, top + 23, _first(chart.about), size=9, color=_PALE_TEXT)
            for shape in shapes:
                _draw(axes, shape, left, top + _CAPTION)
        top += _CAPTION + _BETWEEN + max(tall for _, _, tall in row)
    image = BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a category may have any name
        figure.savefig(image, format="png")
    return image.getvalue()


def _first(about: str, most: int = 72) -> str:
    """The first sentence, or as much as has room."""
    sentence = about.split(". ")[0].rstrip(".")
    return sentence if len(sentence) <= most else sentence[: most - 1] + "…"


def _draw(axes: "Axes", shape: Shape, left: float, top: float) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    if isinstance(shape, Path):
        xs, ys = zip(*((left + x, top + y) for x, y in shape.points), strict=True)
        how: dict[str, Any] = dict(_PATHS[shape.kind])
        if shape.kind == "line":
            dashes = DASHES[shape.look]
            how |= {"color": LIGHT[shape.look], "linestyle": (0, [d / 2 for d in dashes]) if dashes else "-"}
        axes.add_artist(Line2D(xs, ys, **how))  # cheaper than `plot`, which looks for limits
    elif isinstance(shape, Marker):
        look: dict[str, Any] = {
            "marker": _MARKERS[shape.look],
            "markerfacecolor": LIGHT[shape.look],
            "markeredgecolor": "white",
        }
        axes.add_artist(Line2D([left + shape.x], [top + shape.y], markersize=7, markeredgewidth=0.7, **look))
    elif isinstance(shape, Box):
        face = "white" if shape.look else LIGHT[0]
        how = {"facecolor": face, "edgecolor": LIGHT[shape.look], "hatch": _HATCHES[shape.look], "linewidth": 1}
        axes.add_artist(Rectangle((left + shape.x, top + shape.y), shape.width, shape.height, **how))
    else:
        _text(axes, shape, left, top)


def _text(axes: "Axes", text: Text, left: float, top: float) -> None:
    style = _TEXTS[text.kind]
    whole = text.text + text.bold
    _write(axes, left + text.x, top + text.y, whole, ha=_ANCHORS[text.anchor], **style)


def _write(axes: "Axes", x: float, y: float, text: str, **style: Any) -> None:
    axes.text(x, y, text, va="center_baseline", parse_math=False, **style)
