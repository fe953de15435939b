"""From records to examples: tokens, with a mark on every token that is supervised.

Knows: which tokens of a rendered conversation count, what to check before they do, and how to account for every record.
Refuses to know: where records come from, how a template is rendered (`train.template`), batches, and which draft
position reads which token.

`supervised[s]` says that token s is a target that counts: the assistant's text and the token that ends its turn; of
plain text, everything. Token 0 is never a target, because nothing predicts it. Every supervised span is decoded and
compared with the text that it stands for before it is used; a record that fails is left out and counted.
Sizes: S tokens of one example.
"""

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from mtp.errors import UserError
from train.records import Record
from train.report import DataReport
from train.template import Encoded, Tokenizer, Unusable, decode, encode_turns, plain_ids
from train.windows import windows

CHUNK = 512  # records tokenised in one call: enough for the threads of a fast tokenizer, few enough for smooth progress

LOST = "the tokens do not decode to the answer"
NOTHING = "nothing in it is supervised"
NO_PROMPT = "an answer begins at the first token, so that no prompt is left"


@dataclass(frozen=True)
class Example:
    """One sequence: tokens int32 [S], supervised bool [S], and the place of its record."""

    tokens: Tensor
    supervised: Tensor
    where: str

    def __len__(self) -> int:
        return len(self.tokens)


def encode_records(
    records: Sequence[Record],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[list[Example], DataReport]:
    """Examples of at most `max_length` tokens (see `train.windows`), and the account of all records.

    `on_progress(done, total)` is called about every 500 records. Raises UserError if no record can be used at all, if
    chat records meet a tokenizer without a chat template, or if the template cannot be used for a mask.
    """
    if max_length < 2:
        raise UserError(f"data.max_length is {max_length}; allowed is 2 or more, and 512 is a good start.")
    report = DataReport(records=len(records))
    examples: list[Example] = []
    endings = _Endings(tokenizer)
    for start in range(0, len(records), CHUNK):
        chunk = records[start : start + CHUNK]
        for record, encoded in zip(chunk, encode_turns(chunk, tokenizer), strict=True):
            examples += _finish(record, encoded, endings, max_length, report)
        if on_progress is not None:
            on_progress(start + len(chunk), len(records))
    if not examples:
        why = "; ".join(f"{why}: {n} (first: {report.first_dropped[why]})" for why, n in report.dropped.items())
        told = f"data.train or data.val: none of {len(records)} records can be trained on ({why})"
        raise UserError(f"{told}. Each needs a prompt and an answer, or a text: correct the data.")
    return examples, report


def show(example: Example, tokenizer: Tokenizer) -> str:
    """The decoded example with each supervised stretch between ⟦ and ⟧, for people to check the mask."""
    parts = []
    marked_tokens = zip(example.supervised.tolist(), example.tokens.tolist(), strict=True)
    for marked, group in groupby(marked_tokens, lambda pair: pair[0]):
        text = decode(tokenizer, [token for _, token in group])
        parts.append(f"⟦{text}⟧" if marked else text)
    return "".join(parts)


def _finish(
    record: Record, encoded: Sequence[Encoded] | Unusable, endings: "_Endings", max_length: int, report: DataReport
) -> list[Example]:
    """The examples of one record, checked and cut; the record is dropped as a whole only if none is left."""
    if isinstance(encoded, Unusable):
        report.drop(record.where, encoded.reason)
        return []
    examples, reason = [], NOTHING
    for i, item in enumerate(encoded):
        cut_off = not record.finished and i == len(encoded) - 1
        tokens, supervised = _supervise(item, endings, whole=record.kind == "text", cut_off=cut_off)
        if not len(tokens):
            reason = LOST
        elif record.kind != "text" and item.spans and item.spans[0][0] == 0:  # also a mask that is 1 everywhere
            reason = NO_PROMPT
        else:
            examples += _cut(tokens, supervised, record.where, max_length, report)
    if not examples:
        report.drop(record.where, reason)
    report.kept += bool(examples)
    report.examples += len(examples)
    report.tokens += sum(map(len, examples))
    report.supervised_tokens += sum(int(example.supervised.sum()) for example in examples)
    return examples


def _cut(tokens: Tensor, supervised: Tensor, where: str, max_length: int, report: DataReport) -> list[Example]:
    """The windows of a sequence, usually one that is all of it."""
    found = windows(supervised, max_length)
    if found:
        whole = len(tokens) <= max_length
        report.whole += whole
        report.cut += not whole and len(found) == 1
        report.sliced += len(found) > 1
    examples = []
    for start, first, end in found:
        counts = supervised[start:end].clone()
        counts[: first - start] = False
        examples.append(Example(tokens[start:end].clone(), counts, where))
    return examples


def _supervise(item: Encoded, endings: "_Endings", *, whole: bool, cut_off: bool) -> tuple[Tensor, Tensor]:
    """tokens int32 [S], supervised bool [S] of one sequence before cutting; S = 0 where an answer is not in its span.

    With `cut_off` the last answer stops at a length limit: the sequence ends with its text and has no end of turn.
    """
    ids, supervised = item.ids, torch.zeros(len(item.ids), dtype=torch.bool)
    for i, (start, end) in enumerate(item.spans):
        text_end, turn_end = (end, end) if whole else endings.locate(ids, start, end)
        if not _says(endings.tokenizer, ids[start:text_end], item.said[i]):
            return torch.zeros(0, dtype=torch.int32), supervised[:0]
        if cut_off and i == len(item.spans) - 1:
            ids, turn_end = ids[:text_end], text_end
        supervised[start:turn_end] = True
    supervised[:1] = False
    return torch.tensor(ids, dtype=torch.int32), supervised[: len(ids)]


class _Endings:
    """Finds where an answer ends: its text, and the special token after it that ends the turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        self._blank: dict[int, bool] = {}

    def locate(self, ids: Sequence[int], start: int, end: int) -> tuple[int, int]:
        """(end of the text, end of the turn) of an answer in ids[start:end].

        Templates print blanks and sometimes more special tokens after the one that ends the turn; only that one is
        kept. A generation mark may stop just before it, in which case it is taken in. Without any special token the
        turn ends where the span does.
        """
        first, i = None, end
        while i > start and (ids[i - 1] in self.special or self._is_blank(ids[i - 1])):
            i -= 1
            first = i if ids[i] in self.special else first
        if first is None and end < len(ids) and ids[end] in self.special:
            first = end
        return (end, end) if first is None else (first, first + 1)

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            self._blank[token] = not decode(self.tokenizer, [token]).strip()
        return self._blank[token]


def _says(tokenizer: Tokenizer, ids: Sequence[int], said: str) -> bool:
    """Whether the ids read as the text, or as what the tokenizer itself makes of the text if it loses something."""
    read = _bare(decode(tokenizer, ids))
    return _bare(said) in read or _bare(decode(tokenizer, plain_ids(tokenizer, [said])[0])) in read


def _bare(text: str) -> str:
    """Text without blanks and in one Unicode form, which is as much as most tokenizers preserve."""
    return "".join(unicodedata.normalize("NFKC", text).split())
