"""What wandb is given to show of decoded texts."""

import re

import pytest

from decode.stats import DecodeStats
from decode.trace import TracedText, TracedToken
from decode.wandb_media import MARKS, media, samples


def traced(category: str | None = "math") -> TracedText:
    first = (TracedToken("a<b", "a<b", "accepted"), TracedToken(" c", " c", "recovered", (" d",)))
    second = (TracedToken(" e", " e", "accepted"), TracedToken(" שלום", " שלום", "bonus"))
    return TracedText("say <it>", category, "length", (first, second))


def test_a_sample_tells_origins_apart_by_colour_and_by_mark() -> None:
    page = samples([traced(), traced(None)])
    spans = re.findall(r'<span class="(\w+)" title="([^"]*)" style="([^"]*)">([^<]*)</span>', page)
    assert [span[0] for span in spans[:3]] == ["accepted", "recovered", "bonus"], "the legend"
    shown = spans[3:7]
    assert [(span[0], span[3]) for span in shown] == [
        ("accepted", "a&lt;b"),
        ("recovered", "▾ c"),
        ("accepted", " e"),
        ("bonus", "▴ שלום"),
    ]
    assert shown[1][1] == "step 1: recovered in place of &#x27; d&#x27;"
    looks = {origin: (sign, re.findall(r"border-bottom:[^;]*", style)) for origin, (sign, style) in MARKS.items()}
    colours = {origin: re.findall("background:(#[0-9a-f]+)", style) for origin, (_, style) in MARKS.items()}
    for one in ("accepted", "recovered", "bonus"):
        for other in {"accepted", "recovered", "bonus"} - {one}:
            assert looks[one] != looks[other], "without colours"
            assert colours[one] != colours[other]
    assert "http" not in page, "it loads nothing"
    assert page.count("<tr>") == 3
    assert "<td>math</td>" in page
    assert "say &lt;it&gt;" in page
    assert "<td>2.00</td>" in page


def test_tables_and_histogram_hold_what_was_counted() -> None:
    stats = DecodeStats("greedy", 2)
    stats.record(2, 1, 2, [0.5, 0.5])
    stats.record(1, 1, 2, [0.5])
    found = media(stats, [traced(), traced(None)])
    histogram = found["decode/committed_per_step"]
    assert list(histogram.histogram) == stats.histogram == [0, 2, 0]
    assert list(histogram.bins) == [0.5, 1.5, 2.5, 3.5]
    failures = found["decode/failures"]
    assert failures.data == [[" d", " c", 2, "2 (2×)", "math", "a<b"]]
    categories = {row[0]: row for row in found["decode/categories"].data}
    assert categories["math"][1:] == [2.0, pytest.approx(2 / 3), 1, 2, 4, 3, 2]
    assert "(none)" in categories
    assert [row[0] for row in found["decode/contexts"].data] == ["a<b"]
    assert set(found) == {"decode/committed_per_step", "decode/samples", "decode/failures", "decode/contexts"} | {
        "decode/categories"
    }
