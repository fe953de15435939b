"""Decoded texts as wandb shows them: a histogram of tokens per step, coloured samples, and tables of where drafts fail.

Knows: `decode.trace` and wandb's media types. Refuses to know: which run they are logged to.
"""

import html
from collections.abc import Sequence
from typing import Any

from decode.stats import DecodeStats
from decode.trace import Origin, TracedText, by_category, pieces, rejected_pairs, worst_contexts

MARKS: dict[Origin, tuple[str, str]] = {
    "accepted": ("", "background:#cfe8ff;color:#000"),
    "recovered": ("▾", "background:#ffd9a8;color:#000;border-bottom:2px dashed #8a4b00"),
    "bonus": ("▴", "background:#d5d5d5;color:#000;border-bottom:2px solid #444"),
    "plain": ("", ""),
}
"""A sign and a style for each origin: told apart without colours, too."""
NO_CATEGORY = "(none)"
_ROWS = 200  # of a table
_TEXT = 'dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere"'


def media(stats: DecodeStats, texts: Sequence[TracedText]) -> dict[str, Any]:
    """wandb's objects under their keys. Of the tables each has at most 200 rows, the worst first."""
    import wandb

    return {
        "decode/committed_per_step": wandb.Histogram(np_histogram=_histogram(stats)),
        "decode/samples": wandb.Html(samples(texts[:_ROWS]), inject=False),  # in a table it would not be in the run
        "decode/failures": wandb.Table(
            columns=["draft", "came instead", "times", "positions", "categories", "behind"],
            data=[
                [
                    pair.draft,
                    pair.recovered,
                    pair.count,
                    _told(pair.positions),
                    _told(pair.categories) or NO_CATEGORY,
                    pair.before,
                ]
                for pair in rejected_pairs(texts)[:_ROWS]
            ],
        ),
        "decode/contexts": wandb.Table(
            columns=["token before", "acceptance", "judged", "kept", "categories", "example"],
            data=[
                [
                    share.name,
                    share.acceptance,
                    share.judged,
                    share.kept,
                    _told(share.categories) or NO_CATEGORY,
                    share.example.before if share.example else "",
                ]
                for share in worst_contexts(texts)[:_ROWS]
            ],
        ),
        "decode/categories": wandb.Table(
            columns=["category", "τ", "acceptance", "texts", "steps", "tokens", "judged", "kept"],
            data=[
                [
                    row.category or NO_CATEGORY,
                    row.accept_len,
                    row.acceptance,
                    row.texts,
                    row.steps,
                    row.tokens,
                    row.judged,
                    row.kept,
                ]
                for row in by_category(texts)
            ],
        ),
    }


def _histogram(stats: DecodeStats) -> tuple[list[int], list[float]]:
    """Counts, and edges that put each number of tokens in the middle of its bin."""
    return stats.histogram, [n + 0.5 for n in range(len(stats.histogram) + 1)]


def _told(counts: Any) -> str:
    return ", ".join(f"{name}" if count == 1 else f"{name} ({count}×)" for name, count in counts.most_common())


def samples(texts: Sequence[TracedText]) -> str:
    """A page of HTML that needs nothing else: a legend, and a row for each text."""
    legend = " ".join(_span(origin, origin, f"{origin} tokens") for origin in MARKS if origin != "plain")
    rows = "".join(
        f"<tr><td>{html.escape(text.category or NO_CATEGORY)}</td><td {_TEXT}>{html.escape(text.prompt)}</td>"
        f"<td>{len(text.tokens) / max(1, len(text.steps)):.2f}</td><td {_TEXT}>{marked(text)}</td></tr>"
        for text in texts
    )
    return (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<style>td,th{text-align:left;vertical-align:top;padding:.4em;border-bottom:1px solid #ccc}</style>"
        '<body style="font:15px/1.7 system-ui,sans-serif;background:#fff;color:#000">'
        f"<p>{legend} · τ: tokens per step</p>"
        f"<table><tr><th>category<th>prompt<th>τ<th>text</tr>{rows}</table></body>"
    )


def marked(text: TracedText) -> str:
    """The text in spans with the origin's colour and sign; the step, and what was rejected, are in their tooltips."""
    return "".join(
        _span(piece.origin, html.escape(piece.text), _tip(piece.origin, piece.step, piece.rejected))
        for piece in pieces(text)
    )


def _span(origin: Origin, text: str, tip: str) -> str:
    sign, style = MARKS[origin]
    return f'<span class="{origin}" title="{html.escape(tip)}" style="{style}">{sign}{text}</span>'


def _tip(origin: Origin, step: int, rejected: Sequence[str]) -> str:
    instead = f" in place of {' and '.join(map(repr, rejected))}" if rejected else ""
    return f"step {step}: {origin}{instead}"
