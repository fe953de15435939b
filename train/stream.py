"""Data that fit neither memory nor disk: records are read, tokenised and shuffled block by block, without an end.

Knows: a cursor on the rows of a source, blocks of records from several sources, and how to go on inside any of them.
Refuses to know: what a record says (`train.records`, `train.chat`), and Lightning.

A block holds so many records that shuffling inside it is enough. Two are in memory: one in use, and the next, which a
thread reads meanwhile. Every rank reads and tokenises all records and takes its share of the batches; so a run sees the
same batches, in the same order, on any number of ranks, and where it is can be said in a few numbers.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp.errors import UserError
from train.chat import Example
from train.loader import Batch, collate, digest_of
from train.order import Row, epoch_order
from train.records import Record, normalise, open_dataset, open_lines, parse_line

ENDLESS = 2**40  # batches
EMPTY = 100  # blocks in a row without an example, after which something is wrong

Encode = Callable[[list[Record]], list[Example]]


class BadRecord(UserError):
    """Of a record that a stream comes to: what was trained before it need not be lost."""


@contextmanager
def _records() -> Iterator[None]:
    """UserError in here is a BadRecord."""
    try:
        yield
    except UserError as error:
        raise BadRecord(str(error)) from error


class RowStream:
    """The records of one source, round and round; at most `limit` of its rows in each pass."""

    def __init__(self, source: str, split: str, limit: int | None = None) -> None:
        self.source, self.split, self.limit = source, split, limit
        self.passes = self.row = 0
        self._place: Any = None  # in the file or data set, of the next row
        self._rows: Iterator[tuple[str, dict[str, Any], Any]] | None = None

    def take(self, count: int) -> list[Record]:
        """The next so many records. UserError where one cannot be used, or where there are none at all."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Record:
        for _ in range(2):
            if self._rows is None:
                self._rows = self._read()
            if self.limit is None or self.row < self.limit:
                found = next(self._rows, None)
                if found is not None:
                    where, row, self._place = found
                    self.row += 1
                    with _records():
                        return normalise(row, where)
            if not self.row:
                break
            self.passes, self.row, self._place, self._rows = self.passes + 1, 0, None, None
        raise UserError(f"{self.source} holds no records; give a source that is not empty.")

    def _read(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        """Place, content, and where to go on, of each row from the cursor on."""
        if Path(self.source).suffix == ".jsonl":
            return self._read_lines()
        return self._read_dataset()

    def _read_lines(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        with open_lines(Path(self.source)) as file:
            offset, number, length, mark = self._place or (0, 0, 0, 0)
            file.seek(max(0, offset - length))
            if zlib.crc32(file.read(length)) != mark:  # the line before: had any above it changed its length, another
                told = f"the checkpoint stopped after line {number} of {self.source}, which is another line now"
                raise UserError(f"{told}. Resume with the same file, or start a new run without --ckpt_path.")
            for raw in file:
                offset, number = offset + len(raw), number + 1
                if raw.strip():
                    where = f"{self.source}:{number}"
                    with _records():
                        row = parse_line(raw, where)
                    yield where, row, (offset, number, len(raw), zlib.crc32(raw))

    def _read_dataset(self) -> Iterator[tuple[str, dict[str, Any], Any]]:
        rows = open_dataset(self.source, self.split, streaming=True)
        if self._place is not None:
            rows.load_state_dict(self._place)
        for i, row in enumerate(rows, self.row):
            yield f"{self.source}[{self.split}] row {i}", row, rows.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """Where the next record comes from."""
        return {"passes": self.passes, "row": self.row, "place": self._place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""
        self.passes, self.row, self._place, self._rows = state["passes"], state["row"], state["place"], None


@dataclass
class Block:
    """Examples, the batches of all ranks that they make, and where the sources stood before and after."""

    number: int
    examples: list[Example]
    batches: list[list[Row]]
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    name: str
    """Of what the examples are."""


class StreamLoader:
    """A cursor on an endless stream of batches, for training. See the module, and `train.loader.ResumableLoader`.

    Args:
        sources: where records come from.
        shares: of each source among all records, near enough in every block.
        encode: from records to examples; a thread calls it.
        size: records in a block.
        length: batches that will be asked for. Lightning wants to know: where there is no length it reads one batch
            ahead, which a checkpoint would miss.
        identity: what the batches depend on besides; a state of another is refused.
    """

    def __init__(
        self,
        sources: Sequence[RowStream],
        shares: Sequence[float],
        encode: Encode,
        size: int,
        batch_size: int,
        *,
        seed: int = 0,
        pad_id: int = 0,
        rank: int = 0,
        world_size: int = 1,
        row_length: int | None = None,
        length: int = ENDLESS,
        identity: dict[str, Any] | None = None,
    ) -> None:
        self.sources, self.shares, self.encode, self.size = list(sources), list(shares), encode, size
        self.batch_size, self.seed, self.pad_id = batch_size, seed, pad_id
        self.rank, self.world_size, self.row_length, self.length = rank, world_size, row_length, length
        self.identity = {"seed": seed, "batch_size": batch_size, "row_length": row_length or 0, **(identity or {})}
        self._block: Block | None = None
        self._batch = 0  # of the block, over all ranks: the next one
        self._start = 0, [source.state_dict() for source in self.sources]
        self._expected: str | None = None  # the name of the block in which a checkpoint stopped
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._ahead: Future[Block] | None = None

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Batch]:
        while True:
            mine: Batch | None = None
            for rank in range(self.world_size):
                block = self._current()
                if rank == self.rank:
                    rows = [[block.examples[i] for i in row] for row in block.batches[self._batch]]
                    mine = collate(rows, self.pad_id, packed=self.row_length is not None)
                self._batch += 1
            assert mine is not None
            yield mine

    def _current(self) -> Block:
        """The block with the next batch."""
        if self._block is None:
            self._block = self._read(*self._start)
            if self._expected not in (None, self._block.name):
                raise UserError(
                    "the checkpoint stopped inside a block of other records: data.train, or how it is read, has "
                    "changed. Resume with the same data and settings, or start a new run without --ckpt_path."
                )
        while self._batch >= len(self._block.batches):
            done = self._block
            self._block = self._read(done.number + 1, done.after) if self._ahead is None else self._ahead.result()
            self._ahead, self._batch = None, 0
        if self._ahead is None:
            self._ahead = self._thread.submit(self._read, self._block.number + 1, self._block.after)
        return self._block

    def _read(self, number: int, before: list[dict[str, Any]]) -> Block:
        """The next block that has examples, from `before` on."""
        for source, state in zip(self.sources, before, strict=True):
            if source.state_dict() != state:
                source.load_state_dict(state)
        for later in range(EMPTY):
            now = number + later
            counts = [int((now + 1) * self.size * s) - int(now * self.size * s) for s in self._cumulated()]
            counts = [count - less for count, less in zip(counts, [0, *counts], strict=False)]
            records = [r for source, n in zip(self.sources, counts, strict=True) for r in source.take(n)]
            with _records():
                examples = self.encode(records)
            after = [source.state_dict() for source in self.sources]
            if examples:
                lengths, packed = [len(example) for example in examples], self.row_length
                batches = epoch_order(lengths, self.batch_size, seed=self.seed, epoch=now, row_length=packed)
                return Block(now, examples, batches, before, after, digest_of(examples))
            before = after
        raise UserError(
            f"data.train: none of {EMPTY * self.size:,} records in a row can be trained on; correct the data, or let "
            "data.val_size hold out fewer."
        )

    def _cumulated(self) -> list[float]:
        return [sum(self.shares[: i + 1]) / sum(self.shares) for i in range(len(self.shares))]

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch comes from. The same on every rank, and for any number of them."""
        if self._block is None:
            (number, sources), name = self._start, self._expected
        elif self._batch >= len(self._block.batches):
            place = {"block": self._block.number + 1, "batch": 0, "sources": self._block.after, "data": None}
            return {**place, **self.identity}
        else:
            number, sources, name = self._block.number, self._block.before, self._block.name
        return {"block": number, "batch": self._batch, "sources": sources, "data": name, **self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves the cursor. Other sources or settings are a UserError."""
        if "sources" not in state:
            raise UserError("the checkpoint is of a run without data.streaming; resume with it false.")
        changed = [key for key, value in self.identity.items() if state.get(key) != value]
        if changed:
            told = ", ".join(f"{key} was {state.get(key)} and is {self.identity[key]}" for key in changed)
            remedy = "Resume with the same data and settings, or start a new run without --ckpt_path."
            raise UserError(f"the checkpoint stopped inside another stream: {told}. {remedy}")
        if self._ahead is not None:
            self._ahead.exception()  # it moves the sources
        self._block = self._ahead = None
        self._start, self._batch = (state["block"], state["sources"]), state["batch"]
        self._expected = state["data"] if self._batch else None  # before its first batch a block may be any
