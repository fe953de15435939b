"""Where drafts fail, as items of a page: by category of prompt, by draft and recovered token, by context; and texts.

Knows: which of the tables of `decode.trace` a reader is shown, and how much of them. Refuses to know: where texts come
from.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from decode.charts import Bar, Bars, Chart
from decode.page import Cell, Decoded, Section, Table, Token
from decode.trace import START, TracedText, by_category, histogram, judged, rejected_pairs, worst_contexts

TITLE = "Where drafts fail"
_ROWS, _TEXTS = 25, 12
_UNNAMED = "no category"


def section(texts: Sequence[TracedText], about: str) -> Section:
    """Of texts in which something was judged, or only the texts."""
    rows = by_category(texts)
    items: list[Chart | Table | Decoded] = []
    if any(row.judged for row in rows):
        items += [_kept_by_category(texts), _kept_by_position(texts), categories(texts), pairs(texts), contexts(texts)]
    if texts:
        items.append(samples(texts))
    return Section(TITLE, about, tuple(items))


def _kept_by_category(texts: Sequence[TracedText]) -> Bars:
    bars = tuple(
        Bar(row.category or _UNNAMED, "kept", row.acceptance, f"{row.acceptance:.0%} of {row.judged}")
        for row in sorted(by_category(texts), key=lambda row: row.acceptance)
    )
    about = "Share of the judged drafts that stayed. Judged are all up to the first rejected one."
    return Bars("Drafts kept, by category", about, bars, most=1)


def kept_by_position(texts: Sequence[TracedText]) -> dict[int, tuple[int, int]]:
    """Of each draft position that was ever judged, how many drafts were kept, and how many judged."""
    found = list(judged(texts))
    of, kept = Counter(one.position for one in found), Counter(one.position for one in found if one.kept)
    return {k: (kept[k], of[k]) for k in sorted(of)}


def _kept_by_position(texts: Sequence[TracedText]) -> Bars:
    """Where in a step drafts are lost."""
    bars = tuple(
        Bar(f"draft {k}", "kept", kept / of, f"{kept / of:.0%} of {of}")
        for k, (kept, of) in kept_by_position(texts).items()
    )
    about = "Share of the judged drafts that stayed, by draft position. A draft is judged if all before it stayed."
    return Bars("Drafts kept, by position", about, bars, most=1)


def categories(texts: Sequence[TracedText]) -> Table:
    rows = tuple(
        (row.category or _UNNAMED, row.accept_len, row.acceptance, row.judged, row.texts, row.steps, row.tokens)
        for row in by_category(texts)
    )
    columns = ("category", "tokens per step τ", "drafts kept", "drafts judged", "texts", "steps", "tokens")
    return Table("By category of prompt", "The shortest acceptance length first.", columns, rows)


def pairs(texts: Sequence[TracedText]) -> Table:
    found = rejected_pairs(texts)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (Token(pair.draft), Token(pair.recovered), pair.count, _listed(pair.positions), _listed(pair.categories),
         Token(pair.before or START)) for pair in found[:_ROWS]
    )  # fmt: skip
    shown = "" if len(found) <= _ROWS else f" The first {_ROWS} of {len(found)}."
    about = f"What the heads drafted, and the token that came in its place; the most frequent first.{shown}"
    columns = ("rejected draft", "recovered", "times", "draft position", "category", "first seen behind")
    return Table("Rejected drafts and recovered tokens", about, columns, rows)


def contexts(texts: Sequence[TracedText]) -> Table:
    found = worst_contexts(texts)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (Token(share.name), share.acceptance, share.judged, _listed(share.categories),
         Token(share.example.drafts[0] if share.example else ""),
         Token(share.example.committed if share.example else "")) for share in found[:_ROWS]
    )  # fmt: skip
    shown = "" if len(found) <= _ROWS else f" The first {_ROWS} of {len(found)}."
    about = (
        "Tokens behind which a draft was rejected, the least acceptance first; few drafts tell little, so contexts "
        f"with more of them come before.{shown}"
    )
    columns = ("behind the token", "drafts kept", "drafts judged", "category of rejections", "such as", "recovered")
    return Table("Contexts with the lowest acceptance", about, columns, rows)


def samples(texts: Sequence[TracedText]) -> Decoded:
    """Some of every category, those with the shortest acceptance length first."""
    taken: Counter[str | None] = Counter()
    ranked = sorted(texts, key=lambda text: len(text.tokens) / max(1, len(text.steps)))
    turn: list[tuple[int, int]] = []
    for index, text in enumerate(ranked):
        turn.append((taken[text.category], index))
        taken[text.category] += 1
    chosen = tuple(ranked[index] for _, index in sorted(turn)[:_TEXTS])
    shown = "" if len(chosen) == len(texts) else f" {len(chosen)} of {len(texts)} texts, from every category in turn."
    about = f"Every token as it came, the texts with the fewest tokens per step first.{shown}"
    return Decoded("Decoded texts", about, chosen)


def committed(texts: Sequence[TracedText] = (), counts: Sequence[int] | None = None) -> Bars:
    """How many steps committed 1, 2, … tokens."""
    counts = histogram(texts) if counts is None else counts
    whole = max(1, sum(counts))
    bars = tuple(
        Bar("1 token" if size == 1 else f"{size} tokens", "steps", count, f"{count:,} ({count / whole:.0%})")
        for size, count in enumerate(counts, start=1)
    )
    about = "Steps by how many tokens they committed: the accepted drafts, and one more."
    return Bars("Committed tokens per step", about, bars)


def phases(seconds: Mapping[str, float], steps: int) -> tuple[Bars, Table]:
    """Where the time of decoding went: shares of the steps, and seconds."""
    named = {"verify": "verify (base)", "draft": "draft (heads)", "rule": "rule", "other": "other"}
    whole = sum(seconds.get(phase, 0.0) for phase in named) or 1.0
    bars = tuple(
        Bar(name, "share", seconds.get(phase, 0.0) / whole, f"{seconds.get(phase, 0.0) / whole:.1%}")
        for phase, name in named.items()
    )
    about = "Shares of the time of steps: the base's forward over the drafts, drafting, the acceptance rule, the rest."
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (named.get(phase, phase), spent, None if phase == "prefill" else 1e3 * spent / max(1, steps))
        for phase, spent in seconds.items()
    )
    table = Table("Seconds of decoding", f"{steps:,} steps; the prompts are read in prefill.",
                  ("phase", "seconds", "milliseconds per step"), rows)  # fmt: skip
    return Bars("What a step is made of", about, bars, most=1), table


def _listed(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    """Names, with how often where that differs from once."""
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} × {count}" if count > 1 and len(ordered) > 1 else f"{name}" for name, count in ordered)


def counted(number: int, unit: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{number} {unit}{'' if number == 1 else 's'}"
