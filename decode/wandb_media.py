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


def media(stats: DecodeStats, texts: Sequence[TracedText]) -> dict[str, Any]:
    """wandb's objects under their keys. Of the tables each has at most 200 rows, the worst first."""
    import wandb

    found = {
        "decode/committed_per_step": wandb.Histogram(np_histogram=_histogram(stats)),
        "decode/samples": wandb.Table(
            columns=["category", "prompt", "τ", "text", "finish"], data=[_sample(text) for text in texts[:_ROWS]]
        ),
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
    return found


def _histogram(stats: DecodeStats) -> tuple[list[int], list[float]]:
    """Counts, and edges that put each number of tokens in the middle of its bin."""
    return stats.histogram, [n + 0.5 for n in range(len(stats.histogram) + 1)]


def _sample(text: TracedText) -> list[Any]:
    import wandb

    tau = len(text.tokens) / max(1, len(text.steps))
    return [text.category or NO_CATEGORY, text.prompt, tau, wandb.Html(marked(text), inject=False), text.finish_reason]


def _told(counts: Any) -> str:
    return ", ".join(f"{name}" if count == 1 else f"{name} ({count}×)" for name, count in counts.most_common())


def marked(text: TracedText) -> str:
    """A page of HTML with nothing but the text and its legend; what a piece is stands in its tooltip as well."""
    body = "".join(
        _span(piece.origin, html.escape(piece.text), _tip(piece.origin, piece.step, piece.rejected))
        for piece in pieces(text)
    )
    legend = " ".join(_span(origin, origin, f"{origin} tokens") for origin in MARKS if origin != "plain")
    return (
        '<!doctype html><meta charset="utf-8">'
        '<body style="font:15px/1.9 system-ui,sans-serif;background:#fff;color:#000">'
        f"<p>{legend}</p>"
        f'<p dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere">{body}</p></body>'
    )


def _span(origin: Origin, text: str, tip: str) -> str:
    sign, style = MARKS[origin]
    return f'<span class="{origin}" title="{html.escape(tip)}" style="{style}">{sign}{text}</span>'


def _tip(origin: Origin, step: int, rejected: Sequence[str]) -> str:
    instead = f" in place of {' and '.join(map(repr, rejected))}" if rejected else ""
    return f"step {step}: {origin}{instead}"
