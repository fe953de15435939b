"""Decoded texts as wandb shows them: a histogram of tokens per step, coloured samples, and tables of where drafts fail.

Knows: `decode.trace` and wandb's media types. Refuses to know: which run they are logged to.
"""

from collections.abc import Sequence
from typing import Any

from decode.marked import STYLE, legend, marked, safe
from decode.stats import DecodeStats
from decode.trace import TracedText, by_category, rejected_pairs, worst_contexts

NO_CATEGORY = "(none)"
_ROWS = 200  # of a table
_TABLE = """
body { font: 15px/1.5 system-ui, sans-serif; background: #fff; color: #111; }
td, th { text-align: left; vertical-align: top; padding: .4em; border-bottom: 1px solid #ccc; }
td p { margin: 0; }
@media (prefers-color-scheme: dark) { @media screen { body { background: #16181c; color: #eee; } } }
"""


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
    """A page of HTML that needs nothing else: a legend, and a row for each text, in which origins are marked."""
    rows = "".join(
        f"<tr><td>{safe(text.category or NO_CATEGORY)}</td><td class='marked' dir='auto'>{safe(text.prompt)}</td>"
        f"<td>{len(text.tokens) / max(1, len(text.steps)):.2f}</td><td>{marked(text)}</td></tr>\n"
        for text in texts
    )
    return (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}{_TABLE}</style>\n<body>{legend(texts)}\n"
        f"<table><tr><th>category</th><th>prompt</th><th>τ</th><th>text</th></tr>\n{rows}</table></body>\n"
    )
