"""Pages: whole HTML that loads nothing, in which everything that was given is escaped and can be read."""

import re
from typing import Any

import pytest

from decode.charts import Bar, Bars, Line, Lines
from decode.failures import section
from decode.marked import legend, marked, visible
from decode.page import Decoded, Page, Section, Table, Tile, Token, render, slug
from decode.page_style import DARK, LIGHT
from decode.trace import TracedText, TracedToken, pieces
from tests.pages import Seen

NASTY = "<script>alert('x')</script> & \"quotes\" \u202e\x00\ud800 👩‍🚀 שלום"


def page(**changes: Any) -> Page:
    text = TracedText(
        NASTY,
        NASTY,
        "length",
        (
            (TracedToken(NASTY, NASTY, "accepted"), TracedToken(NASTY, NASTY, "recovered", (NASTY,))),
            (TracedToken("\n", "\n", "plain"),),
        ),
    )
    chart = Lines(NASTY, NASTY, (Line(NASTY, ((1.0, 0.1), (2.0, float("nan")), (3.0, 1 / 3))), Line("b", ())), NASTY)
    bars = Bars(NASTY, NASTY, (Bar(NASTY, NASTY, 0.25, NASTY), Bar("b", "c", 1.0)))
    table = Table(NASTY, NASTY, (NASTY, "n"), ((Token(NASTY), 1 / 7), (NASTY, None)))
    items = (chart, bars, table, Decoded(NASTY, NASTY, (text,)))
    given: dict[str, Any] = {
        "title": NASTY,
        "subtitle": NASTY,
        "notices": (NASTY,),
        "tiles": (Tile(NASTY, NASTY, NASTY),),
        "facts": ((NASTY, NASTY),),
        "commands": ((NASTY, NASTY),),
        "sections": (Section("First part", NASTY, items), section([text], NASTY)),
    }
    return Page(**(given | changes))


def test_nothing_that_was_given_becomes_markup() -> None:
    document = render(page())
    seen = Seen(document)
    assert seen.loads == []
    assert not any(tag in ("script", "b") for tag, _ in seen.tags)
    assert not any(name.startswith("on") for _, given in seen.tags for name in given)
    document.encode("utf-8")  # no half of a surrogate pair is left
    assert "\x00" not in document
    assert seen.texts["title"][:1] == [
        "<script>alert('x')</script> & \"quotes\" \u202e\u2400\N{REPLACEMENT CHARACTER} 👩‍🚀 שלום"
    ]


def test_the_check_for_loads_can_fail() -> None:
    for load in ('<img src="x">', '<a href="https://a.b">a</a>', "<style>a{background:url(x.png)}</style>"):
        assert Seen(f"<body>{load}</body>").loads


def test_a_page_for_all_readers() -> None:
    seen = Seen(render(page()))
    assert ("html", {"lang": "en"}) in seen.tags
    assert len(seen.ids) == len(set(seen.ids))
    for _, given in seen.tags:
        for name in str(given.get("aria-labelledby") or "").split():
            assert name in seen.ids
    drawings = [given for tag, given in seen.tags if tag == "svg"]
    assert drawings
    assert all(given["role"] == "img" and given["aria-labelledby"] for given in drawings)
    assert [tag for tag, _ in seen.tags if re.fullmatch(r"h\d", tag)][:2] == ["h1", "h2"]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in seen.tags
    assert all(given.get("scope") == "col" for tag, given in seen.tags if tag == "th")
    links = [str(given["href"])[1:] for tag, given in seen.tags if tag == "a"]
    assert links == ["first-part", "where-drafts-fail"]
    assert set(links) <= set(seen.ids)


def test_under_a_chart_stand_its_numbers_in_full() -> None:
    clean = NASTY.replace("\x00", "\u2400").replace("\ud800", "\N{REPLACEMENT CHARACTER}")
    chart = Lines("chart", "about", (Line("a", ((1.0, 1 / 3), (2.0, 2 / 3))), Line("b", ((2.0, 1e-9),))), "step")
    seen = Seen(render(page(sections=(Section("s", clean, (chart,)),))))
    assert seen.numbers["chart"] == [["step", "a", "b"], [1.0, 1 / 3, ""], [2.0, 2 / 3, 1e-9]]


def contrast(first: str, second: str) -> float:
    """Of two colours, by WCAG 2."""

    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((light(first), light(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(("colours", "paper"), [(LIGHT, "#ffffff"), (DARK, "#14181f")])
def test_lines_stand_out_from_the_paper(colours: tuple[str, ...], paper: str) -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert min(contrast(colour, paper) for colour in colours) >= 3  # what WCAG asks of graphics


# ---- marked texts ------------------------------------------------------------------------------------------------

TEXT = TracedText("why?", None, "stop", (
    (TracedToken("It ", "It", "accepted"), TracedToken("is", "is", "bonus")),
    (TracedToken("<so>", "<so>", "recovered", (" not",)),),
))  # fmt: skip


def test_marks_hold_the_text_and_name_every_origin() -> None:
    seen = Seen(marked(TEXT))
    spans = [given for tag, given in seen.tags if tag == "span"]
    assert [given["class"] for given in spans] == [piece.origin for piece in pieces(TEXT)]
    assert seen.texts["span"] == ["It ", "is", "<so>"]
    assert spans[-1]["title"] == "recovered, step 2, in place of ␣not"
    assert seen.texts["del"] == ["␣not"]


def test_every_origin_is_underlined_in_its_own_way() -> None:
    from decode.marked import STYLE

    ways = [re.search(rf"^\.{origin} {{[^}}]*text-decoration-style: (\w+)", STYLE, re.M) for origin in
            ("accepted", "recovered", "bonus")]  # fmt: skip
    assert len({way.group(1) for way in ways if way}) == 3
    told = "".join(Seen(legend([TEXT])).texts["li"])
    assert told.count("1 token (33%)") == 3


def test_signs_for_what_has_no_shape() -> None:
    assert visible(" a\n\t\u202e") == "␣a⏎⇥\\u202e"
    assert visible("👩‍🚀") == "👩‍🚀"
    assert slug("Acceptance per draft position") == "acceptance-per-draft-position"
