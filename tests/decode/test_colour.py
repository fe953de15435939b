"""Colours of tokens: without the codes nothing is changed, and no code stands inside what is shown as one character."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode.colour import RESET, STYLES, Painter, completed, joins, legend, marks
from decode.text import TextStream

CODE = re.compile(r"\x1b\[[0-9;]*m")
MIXED = "añ👩🏽‍🚀🇩🇪🇫🇷e\u0301ש\u05c1ل\u0627नि世 \n각"
TEXTS = st.lists(
    st.one_of(st.sampled_from([*MIXED, "👩‍🚀", "🇩🇪", "שלום"]), st.characters(exclude_categories=("Cs", "Cc")))
)


def from_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes: every character but ASCII is split."""
    return bytes(token_ids).decode(errors="replace")


def paint(text: str, sizes: Sequence[int], kept: Sequence[int]) -> str:
    """All pieces of a text whose steps commit `sizes` bytes, of which the first `kept` are accepted drafts."""
    ids, stream, painter, out, turn = list(text.encode()), TextStream(from_bytes), Painter(from_bytes), "", 0
    while ids:
        size = sizes[turn % len(sizes)]
        step, ids = ids[:size], ids[size:]
        stays = kept[turn % len(kept)]
        drafted = [place < stays for place in range(len(step))]
        rejected = [] if drafted[-1] or turn % 2 else [0]
        out += painter.paint(stream.push(step, final=not ids), step, drafted, rejected)
        turn += 1
    return out + painter.end()


def torn(shown: str) -> bool:
    """Whether a code stands in front of a character that belongs to the one before."""
    plain, cluster = CODE.split(shown), ""
    for part in plain:
        if part and joins(cluster, part[0]):
            return True
        for character in part:
            cluster = cluster + character if joins(cluster, character) else character
    return False


@settings(deadline=None, max_examples=200)
@given(TEXTS.map("".join), st.lists(st.integers(1, 5), min_size=1), st.lists(st.integers(0, 5), min_size=1))
def test_codes_change_nothing_and_cut_nothing(text: str, sizes: list[int], kept: list[int]) -> None:
    shown = paint(text, sizes, kept)
    assert CODE.sub("", shown) == text
    assert not torn(shown)
    assert shown.count("\x1b") == 0 or shown.rstrip().endswith(RESET) or CODE.split(shown)[-1]  # plain again at the end


def test_a_code_per_token_would_cut() -> None:
    """The negative control: what a painter would do that did not know characters."""
    naive = "".join(f"{STYLES['accepted']}{character}{RESET}" for character in "e\u0301")
    assert torn(naive)
    assert torn(f"👩\u200d{RESET}🚀")
    assert torn(f"🇩{RESET}🇪")
    assert not torn(f"🇩🇪{RESET}🇫🇷")


def test_a_character_has_the_colour_of_the_token_that_completes_it() -> None:
    euro = list("a€b".encode())
    assert completed(from_bytes, [], euro) == ["a", "", "", "€", "b"]
    assert completed(from_bytes, [ord("x")], list(b"yz")) == ["y", "z"]
    painter, stream = Painter(from_bytes), TextStream(from_bytes)
    first = painter.paint(stream.push(euro[:3]), euro[:3], [True, True, False], [7])
    rest = painter.paint(stream.push(euro[3:], final=True), euro[3:], [True, False], [])
    assert first == ""  # the character is not complete, and the piece waits for it
    assert rest + painter.end() == f"{STYLES['accepted']}a€{RESET}b"


def test_codes_only_where_the_style_changes() -> None:
    painter = Painter(from_bytes)
    shown = painter.paint("abcd", list(b"abcd"), [True, True, True, False], [9]) + painter.end()
    assert shown == f"{STYLES['accepted']}abc{RESET}{STYLES['recovered']}d{RESET}"


def test_who_wrote_a_token() -> None:
    assert marks([True, True, False], []) == ["accepted", "accepted", "bonus"]
    assert marks([True, False], [5]) == ["accepted", "recovered"]
    assert marks([False], []) == ["bonus"]


@pytest.mark.parametrize("styled", [True, False])
def test_the_legend_has_room_in_60_columns(styled: bool) -> None:
    assert len(CODE.sub("", legend(styled))) <= 60
    assert bool(CODE.search(legend(styled))) == styled


def test_marks_differ_without_colours() -> None:
    """What is left of a style without its colour: underlined, bold, nothing."""
    bare = {
        mark: [part for part in CODE.findall(style) for part in part[2:-1].split(";")[:1]]
        for mark, style in STYLES.items()
    }
    assert bare == {"accepted": ["4"], "recovered": ["1"], "bonus": []}
