"""What data will be trained on, for people to look at before anything is trained.

Knows: which facts about sources, lengths, masks and draft vocabularies are worth showing, and how. Refuses to know:
consoles, weights of the base, and where the data come from.
Sizes: V vocabulary.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from torch import Tensor

from mtp.errors import UserError
from mtp.loading import load
from mtp.vocab import build_draft_vocab, coverage, unseen
from train.chat import Example
from train.data import ChatDataModule
from train.options import BaseOptions
from train.order import drawn, epoch_order
from train.template import decode

BINS, BAR = 10, 40  # rows of the histogram, and characters of its longest bar
VOCAB_SIZES = (4096, 8192, 16384)
UNSEEN_WARNING = 0.25  # share of the draft vocabulary never seen, above which a smaller one is better


def inspect_data(
    data: ChatDataModule,
    base: BaseOptions,
    draft_vocab_size: int | None,
    home: Path,
    *,
    count: int,
    on_progress: Callable[[str], None],
) -> dict[str, Any]:
    """Sets the data up with the tokenizer of the base; everything about them as one JSON document.

    `count`: examples to show; `home` and `on_progress` as for `FrozenBase.from_pretrained`.
    """
    if count < 0:
        raise UserError(f"--count is {count}; allowed is 0 or more: how many examples to show.")
    if data.streaming:
        raise UserError(
            "data.streaming is true, so nobody knows what the data hold as a whole; look at the beginning with "
            f"--data.streaming false --data.limit {data.stream_sample}."
        )
    vocab_size = lend_tokenizer(data, base, home, on_progress)
    data.setup("fit")
    counts, keep = data.supervised_counts(vocab_size), {*data.tokenizer.all_special_ids}
    chosen = None if draft_vocab_size is None else build_draft_vocab(counts, draft_vocab_size, keep)
    return {
        "sources": [
            {"name": source.name, "weight": source.weight, "drawn_per_epoch": drawn(part), **source.report.to_json()}
            for source, part in zip(data.sources, data.parts(), strict=True)
        ],
        "train": data.train_report.to_json(),
        "validation": None if data.val_report is None else data.val_report.to_json(),
        "left_out_for_validation": data.num_shared,
        "lengths": histogram([len(example) for example in data.train_examples], data.max_length),
        "packing": fill(data) if data.packing else None,
        "draft_vocab_coverage": coverages(counts, keep, draft_vocab_size),
        "warning": None if chosen is None else vocab_warning(counts, chosen),
        "examples": data.preview(count),
    }


def lend_tokenizer(data: ChatDataModule, base: BaseOptions, home: Path, on_progress: Callable[[str], None]) -> int:
    """Gives the data the tokenizer and sizes of a base whose weights are not read; returns V."""
    found = load(
        base.name,
        revision=base.revision,
        dtype=None,
        device=torch.device("cpu"),
        trust_remote_code=base.trust_remote_code,
        home=home,
        on_progress=on_progress,
    )
    sizes = found.config.get_text_config(decoder=True)
    vocab_size, context_length = int(sizes.vocab_size), getattr(sizes, "max_position_embeddings", None)
    data.set_tokenizer(found.tokenizer, vocab_size=vocab_size, context_length=context_length)
    return vocab_size


def lines(document: dict[str, Any], data: ChatDataModule) -> list[str]:
    """The document in words, without the examples."""
    said = []
    for source in document["sources"]:
        told = f"{source['name']}: {source['records']:,} records, {source['examples']:,} examples"
        said.append(f"{told}, weight {source['weight']:g}: {source['drawn_per_epoch']:,} an epoch")
    said.append(f"training: {data.train_report.summary()}")
    if data.val_report is not None:
        said.append(f"validation: {data.val_report.summary()}")
    said += ["tokens of an example:", *bars(document["lengths"])]
    if document["packing"]:
        rows, share = document["packing"]["rows"], document["packing"]["filled"]
        said.append(f"packing: {rows:,} rows of {data.max_length} tokens, {share:.0%} filled")
    shares = ", ".join(f"{size} tokens {share:.2%}" for size, share in document["draft_vocab_coverage"].items())
    said.append(f"supervised tokens that a draft vocabulary can propose: {shares}")
    if document["warning"]:
        said.append(f"warning: {document['warning']}")
    return said


def histogram(lengths: Sequence[int], longest: int) -> list[dict[str, int]]:
    """How many examples have `least`…`most` tokens, in ten bins of about the same width up to `longest`."""
    bins = min(BINS, longest)
    tops = [(i + 1) * longest // bins for i in range(bins)]
    counts = Counter(bisect_left(tops, length) for length in lengths)
    return [
        {"least": least + 1, "most": most, "count": counts[i]}
        for i, (least, most) in enumerate(zip([0, *tops], tops, strict=False))
    ]


def bars(bins: Sequence[dict[str, int]]) -> list[str]:
    """A histogram as text."""
    top = max(1, *(one["count"] for one in bins))
    figures = max(len(f"{one['most']}") for one in bins)
    return [
        f"  {one['least']:>{figures}}–{one['most']:<{figures}} {'█' * -(-one['count'] * BAR // top)} {one['count']:,}"
        for one in bins
    ]


def fill(data: ChatDataModule) -> dict[str, float]:
    """Rows of the first epoch, and the share of their places that hold a token."""
    lengths = [len(example) for example in data.train_examples]
    batches = epoch_order(
        lengths, data.batch_size, seed=data.seed, epoch=0, parts=data.parts(), row_length=data.max_length
    )
    rows = [row for batch in batches for row in batch]
    tokens = sum(lengths[i] for row in rows for i in row)
    return {"rows": len(rows), "filled": tokens / (len(rows) * data.max_length)}


def coverages(counts: Tensor, keep: set[int], chosen: int | None = None) -> dict[str, float]:
    """Share of the supervised tokens that draft vocabularies of several sizes, and of the chosen one, can propose."""
    wanted = sorted({*VOCAB_SIZES, *([] if chosen is None else [chosen])})
    sizes = [size for size in wanted if len(keep) <= size < len(counts)]
    shares = {str(size): coverage(counts, build_draft_vocab(counts, size, keep)) for size in sizes}
    return shares | {f"all {len(counts)}": 1.0}


def vocab_warning(counts: Tensor, ids: Tensor) -> str | None:
    """What to say about a draft vocabulary [Vd] of which the data show too little, if anything."""
    share = unseen(counts, ids.to(counts.device))
    if share <= UNSEEN_WARNING:
        return None
    seen = int((counts > 0).sum())
    return (
        f"model.heads.draft_vocab_size is {len(ids)}, and {share:.0%} of these tokens are never supervised in the "
        f"training data, which hold {seen} different ones; they were filled up by id: use more data or a smaller size"
    )


def coloured(example: Example, data: ChatDataModule) -> Text:
    """The decoded example; what is supervised stands between ⟦ and ⟧ and is green where there are colours."""
    text = Text()
    pairs = zip(example.supervised.tolist(), example.tokens.tolist(), strict=True)
    for marked, group in groupby(pairs, lambda pair: pair[0]):
        shown = decode(data.tokenizer, [token for _, token in group])
        text.append(f"⟦{shown}⟧" if marked else shown, style="green" if marked else "")
    return text
