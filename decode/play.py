"""A text on stdout while it is decoded, with or without colours.

Knows: when to flush, and that a terminal gets its own colours back whatever happens. Refuses to know what a text is
for.
"""

import os
import sys

from jsonargparse import ArgumentParser, Namespace

from decode.colour import Painter, legend
from decode.decoder import Decoder
from decode.stopping import ToText
from decode.stream import Stream
from decode.terminal import Terminal
from decode.text import plain_text
from mtp.errors import UserError
from mtp.suggest import did_you_mean

WHEN = ("auto", "on", "off")


def add_colour(parser: ArgumentParser) -> None:
    """--colour."""
    told = "show which tokens were drafted: auto (on a terminal, unless NO_COLOR is set), on or off"
    parser.add_argument("--colour", type=str, default="auto", metavar="WHEN", help=told)


def wants_colour(options: Namespace) -> bool:
    """What --colour comes to here."""
    if options.colour not in WHEN:
        raise UserError(f"--colour is {options.colour!r}; {did_you_mean(options.colour, WHEN)}")
    if options.colour != "auto":
        return bool(options.colour == "on")
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def colours(decoder: Decoder, wanted: bool, terminal: Terminal) -> ToText | None:
    """What a `Painter` needs, None for none; tells the legend."""
    if not wanted or decoder.base.tokenizer is None:
        return None
    terminal.say(legend(styled=sys.stderr.isatty()))
    return plain_text(decoder.base.tokenizer, special=False)


def play(stream: Stream, to_text: ToText | None = None) -> None:
    """Write the text as it is decoded, and an end of line; in colours if `to_text` is given."""
    painter = None if to_text is None else Painter(to_text)
    try:
        for piece in stream:
            shown = piece.text
            if painter is not None:
                shown = painter.paint(piece.text, piece.token_ids, piece.drafted, piece.rejected)
            sys.stdout.write(shown)
            sys.stdout.flush()
    finally:
        sys.stdout.write(("" if painter is None else painter.end()) + "\n")
        sys.stdout.flush()
