"""Charts as data and as shapes: ticks, numbers, thinning, places of names, and that drawings show what was given."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode import chart_png, svg
from decode.charts import Bar, Bars, Line, Lines, brief, spread, thinned, ticks, told, x_range, y_range
from decode.layout import WIDTH, Box, Marker, Path, Text, place

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-6)


def lines(*series: list[float], least: float | None = None) -> Lines:
    named = tuple(Line(f"line {i}", tuple(enumerate(map(float, ys), 1))) for i, ys in enumerate(series))
    return Lines("title", "About it.", named, "step", least)


@given(low=NUMBERS, span=st.floats(1e-3, 1e5))
def test_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 7
    apart = found[1] - found[0]
    assert re.match(r"[125]0*e", f"{apart:.10e}".replace(".", "")) or f"{apart:.1e}"[0] in "125"
    slack = 1e-6 * max(1.0, abs(low), span)
    assert all(low - slack <= tick <= low + span + slack for tick in found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.123456, "0.1235"),
        (4e-5, "4e-5"),
        (1234.5, "1,234"),
        (123456.0, "123,456"),
        (-0.5, "-0.5"),
        (math.nan, "NaN"),
        (math.inf, "infinite"),
        (-math.inf, "-infinite"),
        (2.5e12, "2.5e12"),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert told(value) == text


def test_numbers_beside_lines_have_three_digits() -> None:
    assert [brief(value) for value in (1.2345, 12.345, 123.45, 2.0, 0.00987, 1.2345e-4)] == [
        "1.23",
        "12.3",
        "123",
        "2",
        "0.00987",
        "1.23e-4",
    ]


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_names_do_not_overlap_and_keep_their_order(values: list[float]) -> None:
    places = spread(values, 10, 0, 100)
    ordered = [place for _, place in sorted(zip(values, places, strict=True), key=lambda pair: pair)]
    assert all(b - a >= 10 - 1e-6 for a, b in zip(ordered, ordered[1:], strict=False))
    assert all(-1e-6 <= place <= 100 + 1e-6 for place in places)
    if min((abs(a - b) for i, a in enumerate(values) for b in values[:i]), default=99) >= 10:
        assert places == pytest.approx(values)


def test_thinning_keeps_ends_and_spikes() -> None:
    calm = [1.0] * 10_000
    calm[1234], calm[8000], calm[5000] = 99.0, -99.0, math.nan
    chart = lines(calm, [float(i) for i in range(10_000)])
    first, second = thinned(chart.lines)
    assert len(first.points) <= 400
    assert [x for x, _ in first.points] == [x for x, _ in second.points]
    assert {(1.0, 1.0), (1235.0, 99.0), (8001.0, -99.0), (10_000.0, 1.0)} <= set(first.points)
    assert thinned(lines([1, 2, 3]).lines) == lines([1, 2, 3]).lines


def test_ranges_hold_all_values_and_never_vanish() -> None:
    assert x_range(lines([5])) == (0, 2)
    low, high = y_range(lines([5, 5]))
    assert low < 5 < high
    assert y_range(lines([3, 4], least=1.0))[0] == 1
    assert y_range(lines([0.5, 4], least=1.0))[0] < 0.5


def test_a_gap_is_not_bridged() -> None:
    shapes, _ = place(lines([1, 2, math.nan, 4, math.inf, 6]))
    assert [len(shape.points) for shape in shapes if isinstance(shape, Path) and shape.kind == "line"] == [2, 1, 1]
    assert sum(isinstance(shape, Marker) and bool(shape.said) for shape in shapes) == 4


@settings(deadline=None)
@given(series=st.lists(st.lists(NUMBERS, min_size=1, max_size=20), min_size=1, max_size=8))
def test_shapes_lie_in_the_picture_and_rise_with_values(series: list[list[float]]) -> None:
    chart = lines(*series)
    shapes, height = place(chart)
    for shape in shapes:
        if isinstance(shape, Marker | Text):
            assert 0 <= shape.x <= WIDTH
            assert -1 <= shape.y <= height
    drawn = [shape for shape in shapes if isinstance(shape, Path) and shape.kind == "line"]
    for ys, path in zip(series, drawn, strict=True):
        heights = [-y for _, y in path.points]
        assert all((a < b) <= (c <= d + 1e-9) for a, b, c, d in zip(ys, ys[1:], heights, heights[1:], strict=False))


def test_every_line_and_bar_differs_in_more_than_colour() -> None:
    drawn = svg.draw(lines(*[[i, i + 1] for i in range(6)]), "x")
    assert len(set(re.findall(r'class="line s\d"[^>]*?(stroke-dasharray="[^"]*"|/>)', drawn))) == 6
    bars = Bars("t", "a", tuple(Bar("g", f"bar {i}", 0.5) for i in range(6)))
    drawn = svg.draw(bars, "x")
    assert drawn.count("<pattern") == 5
    fills = re.findall(r'class="bar s\d"[^>]*', drawn)
    assert all(f"url(#x-h{i})" in fill for i, fill in enumerate(fills) if i)
    assert all(f'id="x-h{i}"' in drawn for i in range(1, 6))
    assert all(f"bar {i}</text>" in drawn for i in range(6))


def test_bars_are_as_long_as_their_values() -> None:
    bars = Bars("t", "a", (Bar("a", "n", 1.0), Bar("b", "n", 0.25), Bar("c", "n", math.nan), Bar("d", "n", -1.0)))
    lengths = [shape.width for shape in place(bars)[0] if isinstance(shape, Box)]
    assert lengths[1] == pytest.approx(lengths[0] / 4)
    assert lengths[2:] == [0, 0]


def test_descriptions_hold_the_numbers_and_escape_names() -> None:
    bars = Bars("a <b> & c", "About.", (Bar("x<y", "n", 0.5), Bar("z", "n", 2.0, "two")))
    drawn = svg.draw(bars, "x")
    assert "a &lt;b&gt; &amp; c" in drawn
    assert "About. x&lt;y: 0.5; z: two." in drawn
    assert "<b>" not in drawn


def test_a_picture_of_everything() -> None:
    chart = lines([1, math.nan, 3], [2], least=0.0)
    chart = Lines(chart.title, chart.about, chart.lines, "step", 0.0, (2.0, "best: $x_1$"), (1.0, "plain"))
    image = chart_png.draw([chart, Bars("日本語 $", "a", (Bar("عربي 🌍", "", 0.5),)), chart], "title", "under")
    assert image.startswith(b"\x89PNG")
    assert image != chart_png.draw([chart], "title", "under")
