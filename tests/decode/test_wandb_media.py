"""What wandb is given to show of decoded texts."""

import re

import pytest

from decode.stats import DecodeStats
from decode.trace import TracedText, TracedToken
from decode.wandb_media import media, samples


def traced(category: str | None = "math") -> TracedText:
    first = (TracedToken("a<b", "a<b", "accepted"), TracedToken(" c", " c", "recovered", (" d",)))
    second = (TracedToken(" e", " e", "accepted"), TracedToken(" שלום", " שלום", "bonus"))
    return TracedText("say <it>", category, "length", (first, second))


def test_samples_are_a_table_of_marked_texts() -> None:
    """Origins are told apart by colour and by the kind of line under them."""
    page = samples([traced(), traced(None)])
    spans = re.findall(r'<span class="(\w+)" title="([^"]*)">([^<]*)</span>', page)
    assert [(origin, text) for origin, _, text in spans[:4]] == [
        ("accepted", "a&lt;b"),
        ("recovered", " c"),
        ("accepted", " e"),
        ("bonus", " שלום"),
    ]
    assert spans[:4] == spans[4:]
    assert "in place of ␣d" in spans[1][1]
    for looks in ("background: #", "text-decoration-style: "):
        values = {re.search(rf"\.{one} {{[^}}]*{looks}(\w+)", page)[1] for one in ("accepted", "recovered", "bonus")}  # type: ignore[index]
        assert len(values) == 3
    assert page.count("<tr>") == 3
    assert "<td>math</td>" in page
    assert "say &lt;it&gt;" in page
    assert "<td>2.00</td>" in page
    assert not re.search("https?:|src=|<script|<link|@import", page), "it loads nothing"


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
