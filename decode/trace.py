"""Where a decoded text came fast and where not: each token's origin, and tables of the drafts that were rejected.

Knows: the steps of finished texts, how to show them in whole characters, and how to count them. Refuses to know:
models, files and colours; ids become text by a function that it is given.
"""

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from decode.engine import Step
from decode.stopping import ToText
from decode.stream import Result
from decode.text import Prompt, TextStream

Origin = Literal["accepted", "recovered", "bonus", "plain"]
"""An accepted draft; the token that replaced a rejected one; the token after drafts that all stayed; the token of a
step without drafts."""
ORIGINS: tuple[Origin, ...] = get_args(Origin)
START = "(start)"
"""The context of the first token of a text."""

_LEFT = 4  # ids that a token's name is decoded behind: tokenizers drop a space at the start of what they decode
_BEFORE = 40  # characters of text that are told of a rejected draft
_JOINER = "\u200d"
_REGIONAL = "".join(map(chr, range(0x1F1E6, 0x1F200)))


@dataclass(frozen=True)
class TracedToken:
    """One committed token."""

    text: str
    """What it adds to the text: empty while a character is incomplete, which the token that ends it brings whole."""
    name: str
    """The token by itself, for tables; `token N` if it is only a part of a character."""
    origin: Origin
    rejected: tuple[str, ...] = ()
    """Names of the drafts in whose place it was recovered: one of a chain, siblings of a tree."""


@dataclass(frozen=True)
class TracedText:
    """One decoded text, step by step."""

    prompt: str
    category: str | None
    finish_reason: str
    steps: tuple[tuple[TracedToken, ...], ...]

    @property
    def tokens(self) -> list[TracedToken]:
        return [token for step in self.steps for token in step]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` reads them."""
        steps = [[[t.text, t.name, t.origin, list(t.rejected)] for t in step] for step in self.steps]
        return {"prompt": self.prompt, "category": self.category, "finish_reason": self.finish_reason, "steps": steps}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "TracedText":
        """ValueError, TypeError or KeyError if that is not what `to_json` gave."""
        steps = tuple(
            tuple(TracedToken(text, name, origin, tuple(rejected)) for text, name, origin, rejected in step)
            for step in document["steps"]
        )
        if not all(token.origin in ORIGINS for step in steps for token in step):
            raise ValueError("a token has no known origin")
        return cls(document["prompt"], document["category"], document["finish_reason"], steps)


@dataclass(frozen=True)
class Piece:
    """A stretch of shown text with one origin for all its characters."""

    text: str
    origin: Origin
    step: int
    """Number of the step that brought it, from 1."""
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judged:
    """One draft position that was judged: every accepted draft, and the first rejected one of a step."""

    category: str | None
    context: str
    """Name of the token before it."""
    before: str
    """The end of the text before it."""
    position: int
    """Draft position in its step, from 1."""
    kept: bool
    drafts: tuple[str, ...]
    committed: str
    """What came there: the draft, or the recovered token."""


@dataclass
class Share:
    """How often drafts behind one context, or of one category, were kept."""

    name: str
    judged: int = 0
    kept: int = 0
    categories: Counter[str] = field(default_factory=Counter)
    """Of the rejections; prompts without a category are not in it."""
    example: Judged | None = None
    """A rejection, if there is one."""

    @property
    def acceptance(self) -> float:
        return self.kept / max(1, self.judged)

    @property
    def rejected(self) -> int:
        return self.judged - self.kept

    def add(self, one: Judged) -> None:
        self.judged += 1
        self.kept += one.kept
        if not one.kept:
            self.example = self.example or one
            self.categories.update([] if one.category is None else [one.category])


@dataclass
class Pair:
    """A draft that was rejected, and the token that came in its place."""

    draft: str
    recovered: str
    count: int = 0
    positions: Counter[int] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    before: str = ""
    """The end of the text before the first of them."""


@dataclass(frozen=True)
class CategoryRow:
    """What decoding the prompts of one category came to."""

    category: str | None
    texts: int
    steps: int
    tokens: int
    judged: int
    kept: int

    @property
    def accept_len(self) -> float:
        """tau: tokens per step."""
        return self.tokens / max(1, self.steps)

    @property
    def acceptance(self) -> float:
        return self.kept / max(1, self.judged)


# ---- from results to traces ------------------------------------------------------------------------------------------


def trace(result: Result, prompt: Prompt, category: str | None, to_text: ToText) -> TracedText:
    """The text of `result`, token by token. `to_text` shows special tokens if they are to be seen in it."""
    stream, done, ids, last = TextStream(to_text), [], list[int](), len(result.token_ids)
    for step in result.steps:
        tokens = []
        for token_id, origin in zip(step.tokens, origins(step), strict=True):
            ids.append(token_id)
            text = stream.push([token_id], final=len(ids) == last)
            rejected = step.rejected if origin == "recovered" else ()
            names = tuple(_name(to_text, ids[:-1], draft) for draft in rejected)
            tokens.append(TracedToken(text, _name(to_text, ids[:-1], token_id), origin, names))
        done.append(tuple(tokens))
    return TracedText(prompt_text(prompt, to_text), category, result.finish_reason, tuple(done))


def origins(step: Step) -> list[Origin]:
    """Where each token of a step comes from."""
    last: Origin = "recovered" if step.rejected else "bonus" if any(step.drafted) else "plain"
    return ["accepted" if drafted else last for drafted in step.drafted]


def prompt_text(prompt: Prompt, to_text: ToText) -> str:
    """A prompt for people: a text as it is, messages with their roles, ids as text."""
    if isinstance(prompt, str):
        return prompt
    if all(isinstance(item, int) for item in prompt):
        return to_text([item for item in prompt if isinstance(item, int)])
    return "\n".join(f"{item['role']}: {item['content']}" for item in prompt if not isinstance(item, int))


def _name(to_text: ToText, before: Sequence[int], token_id: int) -> str:
    left = to_text(before[-_LEFT:])
    name = to_text([*before[-_LEFT:], token_id])[len(left) :]
    whole = name and "\N{REPLACEMENT CHARACTER}" not in name and not left.endswith("\N{REPLACEMENT CHARACTER}")
    return name if whole else f"token {token_id}"


# ---- what is shown ---------------------------------------------------------------------------------------------------


def pieces(text: TracedText) -> list[Piece]:
    """The text cut where the origin or the step changes, but never inside what a reader sees as one character: what
    continues a character, as an accent does, goes with it. An incomplete character goes with the token that ends it."""
    found: list[Piece] = []
    for number, step in enumerate(text.steps, start=1):
        for token in step:
            head = _belongs(found[-1].text, token.text) if found else 0
            if head:
                found[-1] = replace(found[-1], text=found[-1].text + token.text[:head])
            rest = token.text[head:]
            if rest and found and (found[-1].origin, found[-1].step) == (token.origin, number):
                found[-1] = replace(found[-1], text=found[-1].text + rest)
            elif rest:
                found.append(Piece(rest, token.origin, number, token.rejected))
    return found


def _belongs(before: str, text: str) -> int:
    """How many characters of `text` continue the last one of `before`: marks, joined emoji, half a flag."""
    count = 0
    while count < len(text) and _continues(before, text[count]):
        before += text[count]
        count += 1
    return count


def _continues(before: str, character: str) -> bool:
    tone = "\U0001f3fb" <= character <= "\U0001f3ff"  # of a skin
    mark = tone or character == _JOINER or unicodedata.category(character) in ("Mn", "Mc", "Me")
    waiting = len(before) - len(before.rstrip(_REGIONAL))  # a flag is two such letters
    return mark or before.endswith(_JOINER) or (waiting % 2 == 1 and character in _REGIONAL)


# ---- what is counted -------------------------------------------------------------------------------------------------


def judged(texts: Iterable[TracedText]) -> Iterator[Judged]:
    """Every draft position that was judged, in order."""
    for text in texts:
        context, before = START, ""
        for step in text.steps:
            for position, token in enumerate(step, start=1):
                if token.origin in ("accepted", "recovered"):
                    drafts = token.rejected or (token.name,)
                    kept = token.origin == "accepted"
                    yield Judged(text.category, context, before[-_BEFORE:], position, kept, drafts, token.name)
                context, before = token.name, before + token.text


def rejected_pairs(texts: Iterable[TracedText]) -> list[Pair]:
    """Rejected drafts with what came in their place, the most frequent first."""
    found: dict[tuple[str, str], Pair] = {}
    for one in judged(texts):
        for draft in () if one.kept else one.drafts:
            pair = found.setdefault((draft, one.committed), Pair(draft, one.committed, before=one.before))
            pair.count += 1
            pair.positions[one.position] += 1
            pair.categories.update([] if one.category is None else [one.category])
    return sorted(found.values(), key=lambda pair: -pair.count)


def worst_contexts(texts: Iterable[TracedText]) -> list[Share]:
    """Tokens behind which a draft was ever rejected, the lowest acceptance first; of several that never kept one, the
    one with most rejections. One rejection alone tells little, so it counts as if half a draft had been kept too."""
    found: dict[str, Share] = {}
    for one in judged(texts):
        found.setdefault(one.context, Share(one.context)).add(one)
    shares = [share for share in found.values() if share.rejected]
    return sorted(shares, key=lambda share: (share.kept + 0.5) / (share.judged + 0.5))


def by_category(texts: Sequence[TracedText]) -> list[CategoryRow]:
    """A row for each category, the lowest acceptance length first."""
    groups: dict[str | None, list[TracedText]] = defaultdict(list)
    for text in texts:
        groups[text.category].append(text)
    rows = []
    for category, group in groups.items():
        found = list(judged(group))
        steps, tokens = sum(len(text.steps) for text in group), sum(len(text.tokens) for text in group)
        rows.append(CategoryRow(category, len(group), steps, tokens, len(found), sum(one.kept for one in found)))
    return sorted(rows, key=lambda row: row.accept_len)


def histogram(texts: Iterable[TracedText]) -> list[int]:
    """How many steps committed 1, 2, … tokens, up to the most that one did."""
    sizes = Counter(len(step) for text in texts for step in text.steps)
    return [sizes[size] for size in range(1, max(sizes, default=0) + 1)]


def origin_counts(texts: Iterable[TracedText]) -> dict[Origin, int]:
    """Tokens of each origin, in the order of `ORIGINS`."""
    counts = Counter(token.origin for text in texts for token in text.tokens)
    return {origin: counts[origin] for origin in ORIGINS}
