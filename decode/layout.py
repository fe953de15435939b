"""Where everything in a chart stands: shapes in a picture 360 units wide, narrow enough to be read on a phone.

Knows: axes, names at the ends of lines, rows of bars. Refuses to know: colours and file formats. `decode.svg` and
`decode.chart_png` draw the same shapes.

A line is told from others by marker, dashes and the name at its end, a bar by its hatching and name; colour comes on
top.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from decode.charts import Bar, Bars, Chart, Line, Lines, brief, spread, ticks, told, whole_ticks, x_range, y_range

WIDTH = 360.0
LOOKS = 6
"""Lines or bars that look different; more begin again."""
DASHES: tuple[tuple[float, ...], ...] = ((), (7, 3), (2, 3), (8, 3, 2, 3), (4, 2), (1, 3))
"""Of the lines of each look, in units; none is a solid line."""

_TOP, _BOTTOM, _LEFT, _PLOT = 24.0, 34.0, 44.0, 170.0  # margins of lines, and the height between them
_LETTER = 6.1  # width of one, about
_MOST_MARKERS, _MARKERS = 40, 8  # on a line; and on a longer one
_ROW, _HEAD, _GAP = 19.0, 19.0, 7.0  # heights of a bar, of a group's name, and between groups
_BAR = 14.0

PathKind = Literal["grid", "axis", "level", "mark", "lead", "line"]
TextKind = Literal["tick", "name", "strong"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Path:
    kind: PathKind
    points: tuple[Point, ...]
    look: int = 0


@dataclass(frozen=True)
class Marker:
    """`said` is told to who points at it."""

    x: float
    y: float
    look: int
    said: str = ""


@dataclass(frozen=True)
class Text:
    """`y` is the middle of the letters; what is `bold` follows `text` at once."""

    x: float
    y: float
    text: str
    kind: TextKind
    anchor: Literal["start", "middle", "end"] = "start"
    bold: str = ""


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    look: int


Shape = Path | Marker | Text | Box
Scale = Callable[[float], float]


def place(chart: Chart) -> tuple[list[Shape], float]:
    """The shapes of a chart that is not empty, from back to front, and the picture's height."""
    return _lines(chart) if isinstance(chart, Lines) else _bars(chart)


# ---- lines -----------------------------------------------------------------------------------------------------------


def _lines(chart: Lines) -> tuple[list[Shape], float]:
    seen = [(index % LOOKS, line) for index, line in enumerate(chart.lines) if line.finite]
    ends = [line.finite[-1] for _, line in seen]
    letters = max(len(line.name) + 1 + len(brief(y)) for (_, line), (_, y) in zip(seen, ends, strict=True))
    edge, floor = WIDTH - min(165, 24 + _LETTER * letters), _TOP + _PLOT
    (x0, x1), (y0, y1) = x_range(chart), y_range(chart)

    def x(value: float) -> float:
        return _LEFT + (value - x0) / (x1 - x0) * (edge - _LEFT)

    def y(value: float) -> float:
        return floor - (value - y0) / (y1 - y0) * _PLOT

    shapes = [*_axes(chart, x, y, edge), *_level(chart, y, edge), *_mark(chart, x, floor)]
    for look, line in seen:
        shapes += _line(line, look, x, y, chart.x_name)
    rows = spread([y(value) for _, value in ends], 14, _TOP - 8, floor - 4)
    for (look, line), (last, value), row in zip(seen, ends, rows, strict=True):
        if abs(row - y(value)) > 3 or edge - x(last) > 3:
            shapes.append(Path("lead", ((x(last), y(value)), (edge + 5, row))))
        shapes.append(Marker(edge + 10, row, look))
        name = f"{line.name} " if line.name else ""
        shapes.append(Text(edge + 18, row, name, "name", bold=brief(value)))
    return shapes, floor + _BOTTOM


def _axes(chart: Lines, x: Scale, y: Scale, edge: float) -> Iterator[Shape]:
    floor = _TOP + _PLOT
    (x0, x1), (y0, y1) = x_range(chart), y_range(chart)
    for tick in ticks(y0, y1):
        yield Path("grid", ((_LEFT, y(tick)), (edge, y(tick))))
        yield Text(_LEFT - 6, y(tick), told(tick), "tick", "end")
    yield Path("axis", ((_LEFT, floor), (edge, floor)))
    for tick in _x_ticks(chart, edge):
        if x0 <= tick <= x1:
            yield Text(x(tick), floor + 11, told(tick), "tick", "middle")
    yield Text((_LEFT + edge) / 2, floor + 25, chart.x_name, "tick", "middle")


def _x_ticks(chart: Lines, edge: float) -> list[float]:
    """Where values are, if they are few."""
    xs = sorted({x for line in chart.lines for x, _ in line.finite})
    room = max(2, int((edge - _LEFT) / 50))
    apart = min((b - a for a, b in zip(xs, xs[1:], strict=False)), default=1.0)
    few = len(xs) <= room and apart * room >= xs[-1] - xs[0]
    return xs if few else whole_ticks(*x_range(chart), room)


def _level(chart: Lines, y: Scale, edge: float) -> Iterator[Shape]:
    if chart.level is not None:
        value, name = chart.level
        yield Path("level", ((_LEFT, y(value)), (edge, y(value))))
        yield Text(_LEFT + 4, y(value) - 8, name, "tick")


def _mark(chart: Lines, x: Scale, floor: float) -> Iterator[Shape]:
    x0, x1 = x_range(chart)
    if chart.mark is not None and x0 <= chart.mark[0] <= x1:
        column, name = x(chart.mark[0]), chart.mark[1]
        half = _LETTER * len(name) / 2
        yield Path("mark", ((column, _TOP - 5), (column, floor)))
        yield Text(min(max(column, _LEFT + half - 8), WIDTH - half), _TOP - 13, name, "strong", "middle")


def _line(line: Line, look: int, x: Scale, y: Scale, x_name: str) -> Iterator[Shape]:
    for stretch in line.stretches:
        yield Path("line", tuple((x(a), y(b)) for a, b in stretch), look)
    points = line.finite
    every = 1 if len(points) <= _MOST_MARKERS else len(points) // _MARKERS
    for a, b in points[::every]:
        yield Marker(x(a), y(b), look, f"{line.name}, {x_name} {told(a)}: {told(b)}")


# ---- bars ------------------------------------------------------------------------------------------------------------


def _bars(chart: Bars) -> tuple[list[Shape], float]:
    looks = {name: index % LOOKS for index, name in enumerate(chart.names)}
    headed = len(looks) > 1
    labels = [bar.name if headed else bar.group for bar in chart.bars]
    left = min(130.0, 10 + _LETTER * max(map(len, labels)))
    right = 10 + _LETTER * max(len(beside(bar)) for bar in chart.bars)
    scale = (WIDTH - left - right) / chart.longest
    shapes: list[Shape] = []
    y = 2.0
    for group in chart.groups:
        if headed and group:
            shapes.append(Text(0, y + 9, _cut(group, WIDTH), "strong"))
            y += _HEAD
        for bar in (bar for bar in chart.bars if bar.group == group):
            shapes += _bar(bar, bar.name if headed else group, looks[bar.name], left, y, scale)
            y += _ROW
        y += _GAP if headed else 0
    shapes.append(Path("axis", ((left, 0), (left, y))))
    return shapes, y + 2


def _bar(bar: Bar, label: str, look: int, left: float, y: float, scale: float) -> Sequence[Shape]:
    length = max(0.0, bar.value * scale) if math.isfinite(bar.value) else 0.0
    middle = y + 2 + _BAR / 2
    return (
        Text(left - 6, middle, _cut(label, left - 6), "name", "end"),
        Box(left, y + 2, length, _BAR, look),
        Text(left + length + 5, middle, beside(bar), "name"),
    )


def beside(bar: Bar) -> str:
    """What stands at the end of a bar."""
    return bar.told or brief(bar.value)


def _cut(label: str, room: float) -> str:
    most = max(1, int(room / _LETTER))
    return label if len(label) <= most else label[: most - 1] + "…"
