"""Charts as inline SVG: narrow enough to be read on a phone, named and described for those who do not see them.

Knows: how a chart is laid out in a picture 360 units wide. Refuses to know: colours, which the page's style sheet gives
to the classes `s0`, `s1`, … (`decode.page`), and what a chart means.

A line is told from others by marker, dashes and the name at its end, a bar by its hatching and name; colour comes on top.
"""

from collections.abc import Callable, Iterator, Sequence
from html import escape

from decode.charts import Bars, Chart, Line, Lines, brief, spread, ticks, told, whole_ticks, x_range, y_range

WIDTH = 360
LOOKS = 6
"""Lines or bars that look different; more begin again."""

_TOP, _BOTTOM, _LEFT, _PLOT = 22, 34, 44, 170  # margins of lines, and the height between them
_LETTER = 6.0  # width of one, about
_MOST_MARKERS = 40  # on a line; a longer one has eight
_DASHES = ("", "7 3", "2 3", "8 3 2 3", "4 2", "1 3")
_ROW, _HEAD, _GAP = 19, 19, 7  # heights of a bar, of a group's name, and between groups


def draw(chart: Chart, name: str) -> str:
    """The chart as an SVG element; `name` begins the ids of its parts and must be the only one in its page."""
    body, height = _lines(chart) if isinstance(chart, Lines) else _bars(chart, name)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(chart.title)}</title><desc id="{name}-d">{escape(describe(chart))}</desc>'
        f"{body}</svg>"
    )


def describe(chart: Chart) -> str:
    """The chart in words."""
    if isinstance(chart, Bars):
        parts = [f"{' '.join(filter(None, (bar.group, bar.name)))}: {bar.told or told(bar.value)}" for bar in chart.bars]
        return f"{chart.about} {'; '.join(parts)}."
    parts = [
        f"{line.name}: from {told(line.finite[0][1])} to {told(line.finite[-1][1])}" for line in chart.lines if line.finite
    ]
    return f"{chart.about} Over {chart.x_name}. {'; '.join(parts)}."


# ---- lines -----------------------------------------------------------------------------------------------------------


def _lines(chart: Lines) -> tuple[str, float]:
    seen = [(index, line) for index, line in enumerate(chart.lines) if line.finite]
    names = [f"{line.name} {brief(line.finite[-1][1])}".strip() for _, line in seen]
    right = min(150, 22 + _LETTER * max(map(len, names)))
    (x0, x1), (y0, y1) = x_range(chart), y_range(chart)
    edge, floor = WIDTH - right, _TOP + _PLOT

    def x(value: float) -> float:
        return _LEFT + (value - x0) / (x1 - x0) * (edge - _LEFT)

    def y(value: float) -> float:
        return floor - (value - y0) / (y1 - y0) * _PLOT

    parts = [*_axes(chart, x, y, edge), *_level(chart, y, edge), *_mark(chart, x, floor)]
    for index, line in seen:
        parts += _line(line, index, x, y, chart.x_name)
    ends = [y(line.finite[-1][1]) for _, line in seen]
    places = spread(ends, 14, _TOP - 8, floor + 6)
    for (index, line), name, end, place in zip(seen, names, ends, places, strict=True):
        last = x(line.finite[-1][0])
        if abs(place - end) > 3 or edge - last > 3:
            parts.append(f'<path class="lead" d="M{last:.1f} {end:.1f}L{edge + 5:.1f} {place:.1f}"/>')
        parts.append(_marker(index, edge + 10, place))
        parts.append(f'<text class="name" x="{edge + 17:.1f}" y="{place + 4:.1f}">{escape(name)}</text>')
    return "".join(parts), floor + _BOTTOM


Scale = Callable[[float], float]


def _axes(chart: Lines, x: Scale, y: Scale, edge: float) -> Iterator[str]:
    floor = _TOP + _PLOT
    (x0, x1), (y0, y1) = x_range(chart), y_range(chart)
    for tick in ticks(y0, y1):
        yield f'<path class="grid" d="M{_LEFT} {y(tick):.1f}H{edge:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{told(tick)}</text>'
    yield f'<path class="axis" d="M{_LEFT} {floor}H{edge:.1f}"/>'
    for tick in whole_ticks(x0, x1, max(2, int((edge - _LEFT) / 60))):
        if x0 <= tick <= x1:
            yield f'<text class="tick" x="{x(tick):.1f}" y="{floor + 14}" text-anchor="middle">{told(tick)}</text>'
    middle = (_LEFT + edge) / 2
    yield f'<text class="tick" x="{middle:.1f}" y="{floor + 28}" text-anchor="middle">{escape(chart.x_name)}</text>'


def _level(chart: Lines, y: Scale, edge: float) -> Iterator[str]:
    if chart.level is not None:
        value, name = chart.level
        yield f'<path class="level" d="M{_LEFT} {y(value):.1f}H{edge:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT + 4}" y="{y(value) - 4:.1f}">{escape(name)}</text>'


def _mark(chart: Lines, x: Scale, floor: float) -> Iterator[str]:
    x0, x1 = x_range(chart)
    if chart.mark is not None and x0 <= chart.mark[0] <= x1:
        place, name = x(chart.mark[0]), chart.mark[1]
        half = _LETTER * len(name) / 2
        middle = min(max(place, _LEFT + half), WIDTH - half)
        yield f'<path class="mark" d="M{place:.1f} {_TOP - 4}V{floor}"/>'
        yield f'<text class="tick strong" x="{middle:.1f}" y="{_TOP - 9}" text-anchor="middle">{escape(name)}</text>'


def _line(line: Line, index: int, x: Scale, y: Scale, x_name: str) -> Iterator[str]:
    dashes = _DASHES[index % LOOKS]
    how = f' stroke-dasharray="{dashes}"' if dashes else ""
    for stretch in line.stretches:
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in stretch)
        yield f'<path class="line s{index % LOOKS}" d="M{path}"{how}/>'
    points = line.finite
    every = 1 if len(points) <= _MOST_MARKERS else len(points) // 8
    for a, b in points[::every]:
        said = f"{line.name}, {x_name} {told(a)}: {told(b)}"
        yield _marker(index, x(a), y(b), said)


def _marker(index: int, x: float, y: float, said: str = "") -> str:
    title = f"<title>{escape(said)}</title>" if said else ""
    kind = f'class="dot s{index % LOOKS}"'
    if index % LOOKS == 0:
        return f'<circle {kind} cx="{x:.1f}" cy="{y:.1f}" r="3.6">{title}</circle>'
    return f'<path {kind} d="{_SHAPES[index % LOOKS](x, y)}">{title}</path>'


def _polygon(*corners: tuple[float, float]) -> Callable[[float, float], str]:
    return lambda x, y: "M" + "L".join(f"{x + a:.1f} {y + b:.1f}" for a, b in corners) + "Z"


_SHAPES: dict[int, Callable[[float, float], str]] = {
    1: _polygon((-3.3, -3.3), (3.3, -3.3), (3.3, 3.3), (-3.3, 3.3)),
    2: _polygon((0, -4.6), (4.6, 0), (0, 4.6), (-4.6, 0)),
    3: _polygon((0, -4.4), (4.2, 3.2), (-4.2, 3.2)),
    4: _polygon((0, 4.4), (4.2, -3.2), (-4.2, -3.2)),
    5: _polygon(
        *((-1.4, -4.2), (1.4, -4.2), (1.4, -1.4), (4.2, -1.4), (4.2, 1.4), (1.4, 1.4)),
        *((1.4, 4.2), (-1.4, 4.2), (-1.4, 1.4), (-4.2, 1.4), (-4.2, -1.4), (-1.4, -1.4)),
    ),
}

# ---- bars ------------------------------------------------------------------------------------------------------------


def _bars(chart: Bars, name: str) -> tuple[str, float]:
    looks = {bar_name: index for index, bar_name in enumerate(chart.names)}
    headed = len(chart.names) > 1
    left = min(130, 8 + _LETTER * max(len(bar.name if headed else bar.group) for bar in chart.bars))
    right = 8 + _LETTER * max(len(_beside(bar.told, bar.value)) for bar in chart.bars)
    scale = (WIDTH - left - right) / chart.longest
    parts, y = [_hatches(sorted({index % LOOKS for index in looks.values()}), name)], 2.0
    for group in chart.groups:
        if headed and group:
            parts.append(f'<text class="tick strong" x="0" y="{y + 13}">{_cut(group, WIDTH)}</text>')
            y += _HEAD
        for bar in (bar for bar in chart.bars if bar.group == group):
            parts += _bar(bar.name if headed else group, bar.told, bar.value, looks[bar.name], name, left, y, scale)
            y += _ROW
        y += _GAP if headed else 0
    parts.append(f'<path class="axis" d="M{left:g} 0V{y:g}"/>')
    return "".join(parts), y + 2


def _bar(
    label: str, beside: str, value: float, index: int, name: str, left: float, y: float, scale: float
) -> Sequence[str]:
    length = max(0.0, value * scale) if value == value else 0.0
    look = index % LOOKS
    fill = f' fill="url(#{name}-h{look})"' if look else ""
    return (
        f'<text class="name" x="{left - 5:g}" y="{y + 13:g}" text-anchor="end">{_cut(label, left - 5)}</text>',
        f'<rect class="bar s{look}" x="{left:g}" y="{y + 2:g}" width="{length:.1f}" height="{_ROW - 5}"{fill}/>',
        f'<text class="name" x="{left + length + 5:.1f}" y="{y + 13:g}">{escape(_beside(beside, value))}</text>',
    )


def _beside(told_instead: str, value: float) -> str:
    return told_instead or brief(value)


def _cut(label: str, room: float) -> str:
    most = max(1, int(room / _LETTER))
    return escape(label if len(label) <= most else label[: most - 1] + "…")


def _hatches(looks: Sequence[int], name: str) -> str:
    """Fillings of the second look and on; the first is solid."""
    drawn = {
        1: '<path d="M-2 2L2 -2M0 8L8 0M6 10L10 6"/>',
        2: '<path d="M0 2H8M0 6H8"/>',
        3: '<path d="M-2 6L2 10M0 0L8 8M6 -2L10 2M0 8L8 0M-2 2L2 -2M6 10L10 6"/>',
        4: '<path d="M2 0V8M6 0V8"/>',
        5: '<path d="M-2 6L2 10M0 0L8 8M6 -2L10 2"/>',
    }
    patterns = "".join(
        f'<pattern id="{name}-h{look}" class="hatch s{look}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8"/>{drawn[look]}</pattern>'
        for look in looks
        if look
    )
    return f"<defs>{patterns}</defs>" if patterns else ""
