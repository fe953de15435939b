"""A decoded text as HTML in which accepted, recovered and bonus tokens are told apart: by colour, and by underlining.

Knows: marks, their legend and their style sheet, for any page. Refuses to know: what a page is, and where texts come
from. Everything a model or a user wrote is escaped, and stays within its own direction of writing.
"""

from collections.abc import Sequence
from html import escape

from decode.trace import ORIGINS, Origin, Piece, TracedText, origin_counts, pieces

MEANING: dict[Origin, str] = {
    "accepted": "a draft of the heads that the base kept",
    "recovered": "drawn in place of a rejected draft",
    "bonus": "the base's own, after drafts that all stayed",
    "plain": "the base's own, in a step without drafts",
}
STYLE = """
.accepted, .recovered, .bonus { text-decoration: underline 2px; text-underline-offset: 3px;
  text-decoration-skip-ink: none; -webkit-print-color-adjust: exact; print-color-adjust: exact; }
.accepted { background: #0072b22e; text-decoration-style: solid; text-decoration-color: #0072b2; }
.recovered { background: #d55e0033; text-decoration-style: wavy; text-decoration-color: #d55e00; }
.bonus { background: #009e7333; text-decoration-style: double; text-decoration-color: #009e73; }
.marked { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; }
.newline::before { content: "⏎"; opacity: .6; }
.marked del { display: none; opacity: .75; }
@media (prefers-color-scheme: dark) { @media screen {
  .accepted { background: #56b4e938; text-decoration-color: #56b4e9; }
  .recovered { background: #e69f0038; text-decoration-color: #e69f00; }
  .bonus { background: #2fc79a38; text-decoration-color: #2fc79a; }
} }
"""


def marked(text: TracedText) -> str:
    """The text as a paragraph of marked pieces. Rejected drafts are in it, hidden by `STYLE`."""
    return f'<p class="marked" dir="auto">{"".join(map(_piece, pieces(text)))}</p>'


def _piece(piece: Piece) -> str:
    said = f"{piece.origin}, step {piece.step}"
    struck = ""
    if piece.origin == "recovered" and piece.rejected:
        said += f", in place of {' or '.join(map(visible, piece.rejected))}"
        struck = f"<del>{safe(' '.join(map(visible, piece.rejected)))}</del>"
    shown = safe(piece.text).replace("\n", '<span class="newline"></span>\n')
    return f'{struck}<span class="{piece.origin}" title="{safe(said)}">{shown}</span>'


def legend(texts: Sequence[TracedText]) -> str:
    """What the marks mean, and how many tokens of the texts have each."""
    counts = origin_counts(texts)
    whole = max(1, sum(counts.values()))
    items = [
        f'<li><span class="{origin}">{origin}</span> {MEANING[origin]}: '
        f"{counts[origin]:,} {'token' if counts[origin] == 1 else 'tokens'} ({counts[origin] / whole:.0%})</li>"
        for origin in ORIGINS
        if counts[origin] or origin != "plain"
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def visible(token: str) -> str:
    """A token by itself, with signs for spaces and line ends, and numbers for what has no shape."""
    signs = {" ": "␣", "\n": "⏎", "\t": "⇥"}
    return "".join(
        signs.get(letter) or (letter if letter.isprintable() or letter == "\u200d" else f"\\u{ord(letter):04x}")
        for letter in token
    )


def safe(text: str) -> str:
    """Text as it may stand in a page and in its attributes."""
    return escape(without_controls(text))


def without_controls(text: str) -> str:
    """Text that a page can hold: control characters become pictures of them, halves of surrogate pairs a sign."""
    return "".join(
        letter
        if letter in "\n\t" or not (letter < " " or letter == "\x7f" or "\ud800" <= letter <= "\udfff")
        else ("␡" if letter == "\x7f" else chr(0x2400 + ord(letter)) if letter < " " else "\N{REPLACEMENT CHARACTER}")
        for letter in text
    )
