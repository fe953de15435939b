"""The picture of a comparison: acceptance length over K, a line for each architecture, a panel for each temperature.

Knows: matplotlib. Refuses to compute: all figures come from the document of `train.compare_table`.
"""

from io import BytesIO
from typing import TYPE_CHECKING, Any

from decode.charts import spread
from train.compare_table import lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#2b6cb0", "#dd7a1f", "#2f855a", "#c53030", "#6b46c1", "#4a5568")
_MARKERS = ("o", "s", "D", "^", "v", "P")
_TEXT, _PALE_TEXT, _LINE, _GRID = "#1a202c", "#4a5568", "#a0aec0", "#e2e8f0"
_GAP = 0.062  # of a panel's height, between two names


def draw(document: dict[str, Any]) -> bytes:
    """The picture as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    temperatures, about = document["temperatures"], document["about"]
    figure = Figure(figsize=(12, 5.4), dpi=100, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(temperatures), squeeze=False)[0]
    figure.subplots_adjust(left=0.045, right=0.985, top=0.72, bottom=0.08, wspace=0.14)
    title = "Tokens per step of the base, by architecture"
    tokens = document["rows"][0]["tokens_trained"]
    under = f"{about['base']}; each trained on {tokens:,} tokens of the same data; {about['num_prompts']} prompts"
    figure.text(0.025, 0.925, title, size=19, weight="bold", color=_TEXT)
    figure.text(0.025, 0.865, under, size=12.5, color=_PALE_TEXT, parse_math=False)
    top = max(max(lengths(one["measured"], t)) for one in document["rows"] for t in temperatures)
    for axes, temperature in zip(panels, temperatures, strict=True):
        _draw_panel(axes, document, temperature, max(top, 1.05))
    image = BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw_panel(axes: "Axes", document: dict[str, Any], temperature: float, top: float) -> None:
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    axes.tick_params(length=0, labelsize=11, colors=_TEXT)
    rule = document["rules"][f"{temperature:g}"]
    heading, under = f"Temperature {temperature:g}", f"acceptance length τ with K drafts; rule {rule}; 1 without heads"
    axes.text(0, 1.125, heading, transform=axes.transAxes, size=14, weight="bold", color=_TEXT)
    axes.text(0, 1.045, under, transform=axes.transAxes, size=11, color=_PALE_TEXT, parse_math=False)
    last, bottom, ceiling = document["draft_length"], 1.0, 1 + 1.08 * (top - 1)
    lines = [(one["name"], lengths(one["measured"], temperature)) for one in document["rows"]]
    places = spread([values[-1] for _, values in lines], _GAP * (ceiling - bottom))
    for index, ((name, values), y) in enumerate(zip(lines, places, strict=True)):
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        ks = range(1, len(values) + 1)
        axes.plot(ks, values, marker=marker, color=colour, linewidth=2.2, markersize=7.5, markeredgecolor="white")
        x = last + 0.03 * max(1, last - 1)
        axes.text(x, y, f"{name} {values[-1]:.2f}", color=colour, size=12, weight="bold", va="center", parse_math=False)
    axes.set_xticks(range(1, last + 1), [f"K = {k}" for k in range(1, last + 1)])
    axes.set_xlim(1 - 0.07 * max(1, last - 1), last + 0.5 * max(1, last - 1))
    axes.set_ylim(bottom, ceiling)
    heights = [tick for tick in axes.get_yticks() if bottom < tick <= ceiling]
    axes.hlines(heights, axes.get_xlim()[0], last, color=_GRID, linewidth=1, zorder=0)  # not through the names
