"""Where training records come from: sources, their weights, and which records are held out for validation.

Knows: what `data.train` may say, and the split by prompt. Refuses to know: how records are read (`train.records`) and
tokens.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mtp.errors import UserError
from train.records import Record, read_records
from train.report import DataReport


@dataclass
class Source:
    """One source of a mixture: its name, how often an epoch shows each of its records, and the account of them."""

    name: str
    weight: float = 1.0
    report: DataReport = field(default_factory=DataReport)


def parse_mixture(value: dict[str, float] | list[str] | str, option: str = "data.train") -> list[Source]:
    """The sources that an option names: one, several, or a mapping from source to weight."""
    names = [value] if isinstance(value, str) else value
    pairs = names.items() if isinstance(names, Mapping) else [(name, 1.0) for name in names]
    sources = [_source(name, weight, option) for name, weight in pairs]
    if not sources:
        raise UserError(f"{option} is empty; name at least one source: a .jsonl file, another data file, or a Hub id.")
    name, times = Counter(source.name for source in sources).most_common(1)[0]
    if times > 1:
        raise UserError(
            f"{option} names {name} {times} times; name it once, with a weight: {option}: {{{name}: {times}.0}}."
        )
    return sources


def _source(name: str, weight: float, option: str) -> Source:
    if (
        not isinstance(name, str) or not name.strip() or name.lstrip().startswith(("{", "["))
    ):  # what the command line could not read as a mapping
        told = f"{option} has the source {name!r}; allowed are one source, a list of them, or source: weight"
        raise UserError(f"{told}, for example {{a.jsonl: 2.0, b.parquet: 0.5}}. Weights are numbers.")
    if not (math.isfinite(weight) and weight > 0):
        told = f"{option} gives {name} the weight {weight}; allowed is a number above 0"
        raise UserError(f"{told}: how often an epoch shows each record. Leave the source out to show none.")
    return Source(name, float(weight))


def read_sources(
    sources: Sequence[Source], split: str, limit: int | None, streaming: bool = False
) -> list[list[Record]]:
    """The records of each source, at most `limit` of each; `streaming` fetches no more than these."""
    return [read_records(source.name, split=split, limit=limit, streaming=streaming) for source in sources]


def held_out(records: Sequence[Record], val_size: int) -> set[str]:
    """The prompt keys that together have the first `val_size` records or a few more.

    Which prompts are held out is decided by their hash: it depends neither on the order of the records nor on a seed,
    and all records of one prompt are on the same side.
    """
    sizes = Counter(record.prompt_key for record in records)
    held: set[str] = set()
    count = 0
    for key in sorted(sizes, key=_hash):
        if count >= val_size:
            break
        held.add(key)
        count += sizes[key]
    return held


def without_prompts(records: Sequence[Record], keys: set[str]) -> list[Record]:
    """The records whose prompt is not among `keys`."""
    return [record for record in records if record.prompt_key not in keys]


def name_of(keys: set[str]) -> str:
    """A short name for these prompt keys, whatever their order."""
    return hashlib.sha256("\0".join(sorted(keys)).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
