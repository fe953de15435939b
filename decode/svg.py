"""Charts as inline SVG, named and described for those who do not see them.

Knows: SVG. Refuses to know: colours, which the page's style sheet gives to the classes `s0`, `s1`, …
(`decode.page_style`), and where shapes stand (`decode.layout`).
"""

from collections.abc import Callable, Iterable

from decode.charts import Bars, Chart, told
from decode.layout import DASHES, WIDTH, Box, Marker, Path, Shape, Text, place
from decode.marked import safe


def draw(chart: Chart, name: str) -> str:
    """The chart as an SVG element; `name` begins the ids of its parts and must be the only one in its page."""
    shapes, height = place(chart)
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{safe(chart.title)}</title><desc id="{name}-d">{safe(describe(chart))}</desc>'
        f"{_hatches(shapes, name)}{''.join(_element(shape, name) for shape in shapes)}</svg>"
    )


def describe(chart: Chart) -> str:
    """The chart in words."""
    if isinstance(chart, Bars):
        named = len(chart.names) > 1
        parts = [
            f"{' '.join(filter(None, (bar.group, bar.name if named else '')))}: {bar.told or told(bar.value)}"
            for bar in chart.bars
        ]
        return f"{chart.about} {'; '.join(parts)}."
    parts = [
        f"{line.name}: {told(line.finite[0][1])} at the start, {told(line.finite[-1][1])} at the end"
        for line in chart.lines
        if line.finite
    ]
    return f"{chart.about} Over {chart.x_name}. {'; '.join(parts)}."


def _element(shape: Shape, name: str) -> str:
    if isinstance(shape, Path):
        return _path(shape)
    if isinstance(shape, Marker):
        return _marker(shape)
    if isinstance(shape, Text):
        bold = f'<tspan class="strong">{safe(shape.bold)}</tspan>' if shape.bold else ""
        anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
        where = f'x="{shape.x:.1f}" y="{shape.y + 4:.1f}"'
        return f'<text class="{shape.kind}" {where}{anchor}>{safe(shape.text)}{bold}</text>'
    where = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:g}"'
    fill = f' fill="url(#{name}-h{shape.look})"' if shape.look else ""
    return f'<rect class="bar s{shape.look}" {where}{fill}/>'


def _path(path: Path) -> str:
    along = "L".join(f"{x:.1f} {y:.1f}" for x, y in path.points)
    dashes = DASHES[path.look] if path.kind == "line" else ()
    how = f' stroke-dasharray="{" ".join(f"{length:g}" for length in dashes)}"' if dashes else ""
    look = f" s{path.look}" if path.kind == "line" else ""
    return f'<path class="{path.kind}{look}" d="M{along}"{how}/>'


def _marker(marker: Marker) -> str:
    title = f"<title>{safe(marker.said)}</title>" if marker.said else ""
    kind = f'class="dot s{marker.look}"'
    if marker.look == 0:
        return f'<circle {kind} cx="{marker.x:.1f}" cy="{marker.y:.1f}" r="3.6">{title}</circle>'
    return f'<path {kind} d="{_OUTLINES[marker.look](marker.x, marker.y)}">{title}</path>'


def _polygon(*corners: tuple[float, float]) -> Callable[[float, float], str]:
    return lambda x, y: "M" + "L".join(f"{x + a:.1f} {y + b:.1f}" for a, b in corners) + "Z"


_OUTLINES: dict[int, Callable[[float, float], str]] = {
    1: _polygon((-3.3, -3.3), (3.3, -3.3), (3.3, 3.3), (-3.3, 3.3)),
    2: _polygon((0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)),
    3: _polygon((0, -4.4), (4.2, 3.2), (-4.2, 3.2)),
    4: _polygon((0, 4.4), (4.2, -3.2), (-4.2, -3.2)),
    5: _polygon(
        *((-1.4, -4.2), (1.4, -4.2), (1.4, -1.4), (4.2, -1.4), (4.2, 1.4), (1.4, 1.4)),
        *((1.4, 4.2), (-1.4, 4.2), (-1.4, 1.4), (-4.2, 1.4), (-4.2, -1.4), (-1.4, -1.4)),
    ),
}
_HATCHES = {  # the first look is solid
    1: "M-2 2L2 -2M0 8L8 0M6 10L10 6",
    2: "M0 2H8M0 6H8",
    3: "M0 0L8 8M-2 6L2 10M6 -2L10 2M0 8L8 0M-2 2L2 -2M6 10L10 6",
    4: "M2 0V8M6 0V8",
    5: "M0 0L8 8M-2 6L2 10M6 -2L10 2",
}


def _hatches(shapes: Iterable[Shape], name: str) -> str:
    looks = sorted({shape.look for shape in shapes if isinstance(shape, Box) and shape.look})
    patterns = "".join(
        f'<pattern id="{name}-h{look}" class="hatch s{look}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8"/><path d="{_HATCHES[look]}"/></pattern>'
        for look in looks
    )
    return f"<defs>{patterns}</defs>" if patterns else ""
