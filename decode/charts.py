"""Charts as data: what one shows, and the arithmetic that its drawings share.

Knows: lines over a number, bars in groups, and where ticks and names go. Refuses to know: pixels, colours and file
formats (`decode.svg`, `decode.chart_png`), so that two drawings of a chart cannot say different things.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_POINTS = 400
"""Of a line; a longer one is thinned."""


@dataclass(frozen=True)
class Line:
    """One quantity over x; a y that is NaN or infinite is a gap."""

    name: str
    points: tuple[tuple[float, float], ...]

    @property
    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(y)]

    @property
    def stretches(self) -> list[list[tuple[float, float]]]:
        """The points between gaps."""
        found: list[list[tuple[float, float]]] = [[]]
        for x, y in self.points:
            if math.isfinite(y):
                found[-1].append((x, y))
            elif found[-1]:
                found.append([])
        return [stretch for stretch in found if stretch]


@dataclass(frozen=True)
class Lines:
    """Quantities over one x."""

    title: str
    about: str
    """A sentence: what is seen, in which unit."""
    lines: tuple[Line, ...]
    x_name: str
    least: float | None = None
    """Where the y axis begins, unless a value is lower."""
    mark: tuple[float, str] | None = None
    """An x to point out, and its name."""
    level: tuple[float, str] | None = None
    """A y to compare with, and its name."""

    @property
    def empty(self) -> bool:
        return not any(line.finite for line in self.lines)


@dataclass(frozen=True)
class Bar:
    """One quantity; `told` stands beside it in place of the number."""

    group: str
    name: str
    value: float
    told: str = ""


@dataclass(frozen=True)
class Bars:
    """Quantities side by side, in groups; bars of one name look alike."""

    title: str
    about: str
    bars: tuple[Bar, ...]
    most: float | None = None
    """Where the axis ends, unless a value is larger."""

    @property
    def empty(self) -> bool:
        return not any(math.isfinite(bar.value) for bar in self.bars)

    @property
    def names(self) -> list[str]:
        """In order; a bar's look goes by the place of its name here."""
        return list(dict.fromkeys(bar.name for bar in self.bars))

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(bar.group for bar in self.bars))

    @property
    def longest(self) -> float:
        """The axis goes from 0 to here."""
        return max([self.most or 0.0, *(bar.value for bar in self.bars if math.isfinite(bar.value))]) or 1.0


Chart = Lines | Bars


def told(value: float) -> str:
    """A number for people: four significant digits, or all of a larger whole one."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    if value and not 1e-3 <= abs(value) < 1e9:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def brief(value: float) -> str:
    """The same beside a line or bar, where there is room for three digits."""
    if not math.isfinite(value):
        return told(value)
    if value and not 1e-3 <= abs(value) < 1e9:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:#.3g}".rstrip(".")


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, at most `most` + 1 of them, 1, 2 or 5 times a power of ten apart."""
    if not high > low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    apart = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    digits = max(0, -math.floor(math.log10(apart) + 1e-9))
    return [round(number * apart, digits) for number in range(first, last + 1)]


def whole_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """The same for what is counted in whole numbers."""
    return [tick for tick in ticks(low, high, most) if tick.is_integer()] or [low]


def x_range(chart: Lines) -> tuple[float, float]:
    """What the x axis spans, never nothing."""
    xs = [x for line in chart.lines for x, _ in line.finite]
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 1, high + 1)


def y_range(chart: Lines) -> tuple[float, float]:
    """What the y axis spans: all finite values and the level, with some air."""
    ys = [y for line in chart.lines for _, y in line.finite]
    ys += [] if chart.level is None else [chart.level[0]]
    low = min(ys) if chart.least is None else min(chart.least, *ys)
    high = max(ys)
    air = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if chart.least == low else low - air), high + air


def thinned(lines: Sequence[Line], most: int = MOST_POINTS) -> tuple[Line, ...]:
    """All lines at the same few x: the first, the last, and where any line is lowest or highest in a stretch of x."""
    xs = sorted({x for line in lines for x, _ in line.points})
    if len(xs) <= most:
        return tuple(lines)
    stretches = max(1, most // (2 * len(lines)))
    kept = {xs[0], xs[-1]}
    for line in lines:
        finite = line.finite
        bounds = [round(index * len(finite) / stretches) for index in range(stretches + 1)]
        for start, end in pairwise(bounds):
            if stretch := finite[start:end]:
                kept |= {min(stretch, key=lambda point: point[1])[0], max(stretch, key=lambda point: point[1])[0]}
    return tuple(Line(line.name, tuple(point for point in line.points if point[0] in kept)) for line in lines)


def spread(values: Sequence[float], gap: float, low: float = -math.inf, high: float = math.inf) -> list[float]:
    """Places for names near the values, in their order, at least `gap` apart, within `low` and `high` if they fit."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _ends(groups[-2], values, gap)[1] + gap > _ends(groups[-1], values, gap)[0]:
            tail = groups.pop()
            groups[-1] += tail
    places = [0.0] * len(values)
    for group in groups:
        start = _ends(group, values, gap)[0]
        for rank, index in enumerate(group):
            places[index] = start + rank * gap
    return _within(places, order, gap, low, high)


def _ends(group: Sequence[int], values: Sequence[float], gap: float) -> tuple[float, float]:
    """Of names stacked around the mean of their values."""
    middle, half = sum(values[index] for index in group) / len(group), (len(group) - 1) * gap / 2
    return middle - half, middle + half


def _within(places: list[float], order: Sequence[int], gap: float, low: float, high: float) -> list[float]:
    """Push names up from the lower end, then down from the upper one."""
    least = low
    for index in order:
        places[index] = max(places[index], least)
        least = places[index] + gap
    most = high
    for index in reversed(order):
        places[index] = min(places[index], most)
        most = places[index] - gap
    return places
