"""What became of the records of a source: the account that users see before anything is trained.

Knows: the counts and how to say them. Refuses to know: who counts.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DataReport:
    """The account of records. Token counts are after cutting.

    A record is rendered as one sequence, or as several where a template rewrites earlier turns. A sequence becomes one
    example if it fits (`whole`), one that leaves out tokens around it (`cut`), or several windows (`sliced`).
    `first_dropped` holds, for each reason, the place of the first record dropped for it. `notes` are sentences about
    where the tokens come from.
    """

    records: int = 0
    kept: int = 0
    examples: int = 0
    whole: int = 0
    cut: int = 0
    sliced: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def drop(self, where: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.first_dropped.setdefault(reason, where)

    def summary(self) -> str:
        """The counts in two sentences, then a line for each reason to drop records and for each note."""
        share = self.supervised_tokens / max(1, self.tokens)
        fate = f"{self.whole:,} whole, {self.cut:,} cut at max_length, {self.sliced:,} sliced into windows of it"
        lines = [
            f"{self.kept:,} of {self.records:,} records kept as {self.examples:,} examples (of the sequences {fate}). "
            f"{self.tokens:,} tokens, {self.supervised_tokens:,} supervised ({share:.0%})."
        ]
        lines += [f"{n:,} dropped: {why} (first: {self.first_dropped[why]})" for why, n in self.dropped.most_common()]
        return "\n".join([*lines, *self.notes])

    def to_json(self) -> dict[str, Any]:
        """The counts as plain JSON types, with what `from_json` needs."""
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self).items()
            if name != "notes"
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "DataReport":
        return cls(**(document | {"dropped": Counter(document["dropped"])}))


def total(reports: Iterable[DataReport]) -> DataReport:
    """The account of several sources together."""
    whole = DataReport()
    for report in reports:
        for name, value in vars(report).items():
            if isinstance(value, int):
                setattr(whole, name, getattr(whole, name) + value)
        whole.dropped.update(report.dropped)
        whole.first_dropped = report.first_dropped | whole.first_dropped
        whole.notes += report.notes
    return whole
