"""Which tokens of a text were drafted, shown in a terminal while it is written.

Knows: escape codes, and that what is shown as one character must not be cut by them. Refuses to know streams and
options: texts go in, texts come out, and without the codes they are the same.

Told apart by colours that the colour-blind can tell apart too (blue and vermilion, legible on white and on black), and
without colours by underlining and weight.
"""

import os.path
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Literal

from decode.stopping import ToText
from decode.stream import Result
from decode.text import TextStream

Mark = Literal["accepted", "recovered", "bonus"]
"""Of a token: a draft that was kept; drawn in the place of one; drawn behind drafts that all stayed, or behind none."""

RESET = "\x1b[0m"
STYLES: Mapping[Mark, str] = {"accepted": "\x1b[4;38;5;32m", "recovered": "\x1b[1;38;5;166m", "bonus": ""}
_SHOWN_BY: Mapping[Mark, str] = {"accepted": "underlined: accepted draft", "recovered": "bold: recovered"}
_JOINER = "\u200d"
_JOINED = {"\u200c", _JOINER, "\uff9e", "\uff9f"}  # besides the marks of Unicode
_JOINED_RANGES = ((0x1160, 0x11FF), (0x1F3FB, 0x1F3FF), (0xE0020, 0xE007F))  # Hangul, tones of skin, tags of flags


def legend(styled: bool) -> str:
    """One line, at most 60 columns wide."""
    parts = [f"{STYLES[mark]}{told}{RESET}" if styled else told for mark, told in _SHOWN_BY.items()]
    return ", ".join([*parts, "plain: bonus"])


def marks(drafted: Sequence[bool], rejected: Sequence[int]) -> list[Mark]:
    """Of the tokens of one step; see `decode.stream.Piece`."""
    return ["accepted" if kept else "recovered" if rejected else "bonus" for kept in drafted]


def completed(to_text: ToText, before: Sequence[int], ids: Sequence[int]) -> list[str]:
    """The text that each of `ids` completes, behind `before`; together, what they add to it.

    A character that is split over tokens belongs to the last of them.
    """
    whole, start = to_text([*before, *ids]), len(to_text(before))
    ends = [start]
    for count in range(1, len(ids)):
        text = to_text([*before, *ids[:count]])
        ends.append(max(ends[-1], len(os.path.commonprefix([text, whole]))))  # the rest is not complete yet
    ends.append(max(ends[-1], len(whole)))
    return [whole[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)][: len(ids)]


def joins(cluster: str, character: str) -> bool:
    """Whether a terminal shows `character` as part of the cluster before it: a mark, the next part of an emoji, the
    second letter of a flag. The rules of Unicode's Annex 29, but for those of single scripts."""
    if not cluster:
        return False
    if character in _JOINED or unicodedata.category(character)[0] == "M":
        return True
    if any(first <= ord(character) <= last for first, last in _JOINED_RANGES):
        return True
    return cluster[-1] == _JOINER or (_is_flag_letter(character) and len(cluster) == 1 and _is_flag_letter(cluster))


def _is_flag_letter(character: str) -> bool:
    return 0x1F1E6 <= ord(character) <= 0x1F1FF


class Painter:
    """Puts codes into the pieces of one text. No code ever stands inside a cluster of characters, not even where two
    pieces meet: the first one is left as it is coloured until something that does not belong to it follows."""

    def __init__(self, to_text: ToText) -> None:
        self._to_text = to_text
        self._shown: list[int] = []  # as in TextStream, whose pieces these are
        self._waiting: list[tuple[int, Mark]] = []
        self._cluster, self._style = "", ""

    def paint(self, text: str, token_ids: Sequence[int], drafted: Sequence[bool], rejected: Sequence[int]) -> str:
        """A piece with its codes; the arguments are the fields of `Piece` or `Step`."""
        self._waiting += zip(token_ids, marks(drafted, rejected), strict=True)
        if not text:
            return ""
        ids, colours = [token for token, _ in self._waiting], [mark for _, mark in self._waiting]
        parts = completed(self._to_text, self._shown, ids)
        if "".join(parts) != text:  # a tokenizer that changes what it has shown: all of it by the last token
            parts, colours = [text], colours[-1:]
        self._shown, self._waiting = ids, []
        return "".join(self._with_codes(part, STYLES[mark]) for part, mark in zip(parts, colours, strict=True))

    def end(self) -> str:
        """What returns the terminal to its own colours."""
        style, self._style, self._cluster = self._style, "", ""
        return RESET if style else ""

    def _with_codes(self, text: str, style: str) -> str:
        out = []
        for character in text:
            if joins(self._cluster, character):
                self._cluster += character
            else:
                self._cluster = character
                if style != self._style:
                    out.append((RESET if self._style else "") + style)
                    self._style = style
            out.append(character)
        return "".join(out)


def painted(result: Result, to_text: ToText) -> str:
    """A finished text with its codes."""
    painter, stream, out = Painter(to_text), TextStream(to_text), []
    for step in result.steps:
        text = stream.push(step.tokens, final=step.finish_reason is not None)
        out.append(painter.paint(text, step.tokens, step.drafted, step.rejected))
    return "".join([*out, painter.end()])
