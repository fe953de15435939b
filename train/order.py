"""Which examples an epoch holds and in which rows and batches: pure functions of sizes, seed and epoch.

Knows: the share of a source in a mixture, shuffling, sorting by length, packing into rows, and the share of a rank.
Refuses to know: tokens, tensors, and how far a run has come.
"""

import math
import random
from collections.abc import Sequence

Row = list[int]  # indices of the examples of one row, in order; without packing it is one
Part = tuple[int, float]  # of one source: how many examples it has, and its weight

WINDOW = 16  # batches among which examples are sorted by length: most padding goes, the order stays close to random
PACK_WINDOW = 256  # examples among which rows are filled up


def drawn(part: Part) -> int:
    """How many examples of a source an epoch holds: size × weight, rounded, and at least one."""
    count, weight = part
    return max(1, round(count * weight)) if count else 0


def epoch_examples(parts: Sequence[Part], *, seed: int, epoch: int) -> Row:
    """The indices of an epoch, not yet shuffled; those of the sources follow one another.

    Each source is shuffled once and walked through round and round, `drawn` examples an epoch. So with weight 2 every
    example comes twice an epoch; with 0.5 one half comes in an epoch and the other half in the next; and after any
    number of epochs no example is more than one ahead of another of its source.
    """
    indices: Row = []
    first = 0
    for number, (count, weight) in enumerate(parts):
        walk = list(range(first, first + count))
        if weight != 1:
            random.Random(f"{seed}/source {number}").shuffle(walk)
            size = drawn((count, weight))
            walk = [walk[(epoch * size + i) % count] for i in range(size)] if count else []
        indices += walk
        first += count
    return indices


def epoch_order(
    lengths: Sequence[int],
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    parts: Sequence[Part] | None = None,
    row_length: int | None = None,
) -> list[list[Row]]:
    """The batches of one epoch, each of them rows of indices; depends on nothing but the arguments.

    Examples are shuffled. With `row_length` they are packed into rows of so many tokens, and the rows are shuffled.
    Without, they are sorted by length within windows of 16 batches, and the batches of a window are shuffled.
    """
    chance = random.Random(f"{seed}/{epoch}")  # a text seed is hashed, so neighbouring seeds and epochs share nothing
    order = epoch_examples(parts or [(len(lengths), 1.0)], seed=seed, epoch=epoch)
    chance.shuffle(order)
    if row_length is not None:
        rows = pack(order, lengths, row_length)
        chance.shuffle(rows)
        return _cut(rows, batch_size)
    batches: list[list[Row]] = []
    for start in range(0, len(order), batch_size * WINDOW):
        window = sorted(order[start : start + batch_size * WINDOW], key=lambda i: lengths[i])
        cut = _cut([[i] for i in window], batch_size)
        chance.shuffle(cut)
        batches += cut
    return batches


def pack(order: Sequence[int], lengths: Sequence[int], row_length: int) -> list[Row]:
    """Rows of at most `row_length` tokens. Among 256 examples the longest comes first, into the first row with room."""
    rows: list[Row] = []
    for start in range(0, len(order), PACK_WINDOW):
        window = sorted(order[start : start + PACK_WINDOW], key=lambda i: -lengths[i])
        shortest = lengths[window[-1]]
        open_rows: list[tuple[int, Row]] = []  # room and row
        for i in window:
            place = next((p for p, (room, _) in enumerate(open_rows) if room >= lengths[i]), len(open_rows))
            if place == len(open_rows):
                rows.append([])
                open_rows.append((row_length, rows[-1]))
            room, row = open_rows[place]
            row.append(i)
            open_rows[place] = (room - lengths[i], row)
            if open_rows[place][0] < shortest:  # nothing fits in any more
                del open_rows[place]
    return rows


def rank_share(batches: Sequence[list[Row]], rank: int, world_size: int) -> list[list[Row]]:
    """Every `world_size`-th batch from `rank` on. Ranks get equally many: who has none left gets an empty one."""
    share = math.ceil(len(batches) / world_size)
    places = range(rank, share * world_size, world_size)
    return [batches[i] if i < len(batches) else [] for i in places]


def _cut(rows: list[Row], batch_size: int) -> list[list[Row]]:
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
