"""The Lightning data module: from names of sources to loaders.

Knows: which records are for training and which for validation, and which loader each of them gets.
Refuses to know: how records are read and marked (`train.records`, `train.chat`), where tokens are kept
(`train.token_cache`), and in which order batches come (`train.order`).
Sizes: V vocabulary.
"""

import copy
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
from torch import Tensor

from mtp.errors import UserError
from train.chat import Example, encode_records, show
from train.loader import Batch, FixedLoader, ResumableLoader
from train.order import Part
from train.records import Record
from train.report import DataReport, total
from train.sources import held_out, name_of, parse_mixture, read_sources, without_prompts
from train.stream import ENDLESS, RowStream, StreamLoader
from train.template import Tokenizer
from train.token_cache import Encoded, encode_cached


class ChatDataModule(lightning.LightningDataModule):
    """Records from files or `datasets`, encoded with the tokenizer of the base, in batches.

    Call `set_tokenizer` before `setup`. After `setup`: `train_examples`, those of the sources one after another,
    `val_examples`, `sources` with an account of each, their sum `train_report`, `val_report` (None without validation),
    and `num_shared`, the number of training records left out because their prompt is in `val`.

    An example longer than `max_length` is sliced into windows: each supervised token counts in exactly one of them, and
    a window starts max_length / 4 before its first target for context. Where the prompt alone is longer, its left goes.

    Args:
        train: Where training records come from: .jsonl files, other local data files, or Hub ids that `datasets` loads
            (`org/name` or `org/name:subset`). One, several, or a mapping from source to weight: how often an epoch
            shows each record of the source, on average. 2.0 is twice; with 0.5 every other epoch shows the other half.
        val: The same for validation, without weights. Records of `train` whose prompt also occurs here are left out.
        val_size: Without `val`: how many records of `train` are held out for validation. 0 means no validation.
        max_length: Longest sequence in tokens; what is longer is sliced.
        batch_size: Rows in a training batch, on each device. A row is one example, or several with `packing`.
        val_batch_size: Sequences in a validation batch; by default as in training.
        packing: Fill rows up to `max_length` with several examples, each of which sees itself only. The same loss with
            less padding; validation is never packed.
        seed: Decides the order of training batches.
        limit: Use only that many records of each source of `train`, before anything is held out.
        streaming: Read `train` while training, for data larger than memory or disk. What is told before the first step,
            the draft vocabulary, and what `val_size` holds out come from the first `stream_sample` records of each
            source. Weights are then shares of the records, in every block alike, and `trainer.max_steps` says when to
            end.
        stream_buffer: Records of all sources that are shuffled among each other; two such blocks are in memory.
        stream_sample: See `streaming`.
        split: The split of `train` sources that have splits.
        val_split: The split of `val` sources that have splits.
        cache_dir: Folder in which tokens are kept, so that the same data are tokenised once; null keeps none.
    """

    def __init__(
        self,
        train: dict[str, float] | list[str] | str,
        val: list[str] | str | None = None,
        val_size: int = 64,
        max_length: int = 512,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        packing: bool = False,
        seed: int = 0,
        limit: int | None = None,
        streaming: bool = False,
        stream_buffer: int = 4096,
        stream_sample: int = 10_000,
        split: str = "train",
        val_split: str = "validation",
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("val_size", val_size, 0),
            ("max_length", max_length, 2),
            ("batch_size", batch_size, 1),
            ("val_batch_size", 1 if val_batch_size is None else val_batch_size, 1),
            ("limit", 1 if limit is None else limit, 1),
            ("stream_buffer", stream_buffer, 1),
            ("stream_sample", stream_sample, 1),
        ):
            if value < least:
                raise UserError(f"data.{name} is {value}; allowed is {least} or more.")
        self.sources = parse_mixture(train)
        self.val_sources = [] if val is None else parse_mixture(val, "data.val")
        self.val_size, self.max_length, self.seed, self.limit = val_size, max_length, seed, limit
        self.batch_size, self.val_batch_size, self.packing = batch_size, val_batch_size or batch_size, packing
        self.streaming, self.stream_buffer, self.stream_sample = streaming, stream_buffer, stream_sample
        self.split, self.val_split = split, val_split
        self._held: set[str] = set()  # prompts of validation
        self._own_tokenizer: Tokenizer = None
        self.cache_dir = None if cache_dir is None else Path(cache_dir).expanduser()
        self.tokenizer: Tokenizer = None
        self.vocab_size: int | None = None
        self.context_length: int | None = None
        self.on_progress: Callable[[int, int], None] | None = None
        self.train_examples: list[Example] = []
        self.val_examples: list[Example] = []
        self.train_report = DataReport()
        self.val_report: DataReport | None = None
        self.num_shared = 0

    def set_tokenizer(
        self, tokenizer: Tokenizer, *, vocab_size: int | None = None, context_length: int | None = None
    ) -> None:
        """The tokenizer of the base; its chat template decides how records are rendered. With the base's sizes given,
        `setup` checks that every token is in its vocabulary and every example within its context."""
        self.tokenizer, self.vocab_size, self.context_length = tokenizer, vocab_size, context_length

    def setup(self, stage: str | None = None) -> None:
        """Reads and encodes everything, once. `on_progress(done, total)` is told about the training records."""
        if self.train_examples:
            return
        assert self.tokenizer is not None, "set_tokenizer comes before setup"
        train, val = self._records()
        before, whole = 0, sum(map(len, train))
        examples: list[Example] = []
        for source, records in zip(self.sources, train, strict=True):
            if records:
                found, source.report = self._encode(records, before, whole)
                examples += found
            before += len(records)
        self.train_report = total(source.report for source in self.sources)
        if self.num_shared:
            self.train_report.notes.append(f"{self.num_shared:,} training records left out: data.val has their prompt")
        if self.streaming:
            self.train_report.notes.append(
                f"streaming: so far the first {self.stream_sample:,} records of each source were looked at"
            )
        if val:
            self.val_examples, self.val_report = self._encode(val)
        self._check(examples + self.val_examples)
        self.train_examples = examples

    def train_dataloader(self) -> ResumableLoader | StreamLoader:
        """This rank's share of the training batches."""
        return self._stream(*self._place()) if self.streaming else self._train_loader(*self._place())

    def all_batches(self) -> ResumableLoader:
        """The training batches of all ranks, in order; of the first records only with `streaming`."""
        return self._train_loader(0, 1)

    def _train_loader(self, rank: int, world_size: int) -> ResumableLoader:
        return ResumableLoader(
            self.train_examples,
            self.batch_size,
            seed=self.seed,
            pad_id=self._pad_id(),
            rank=rank,
            world_size=world_size,
            parts=self.parts(),
            row_length=self.max_length if self.packing else None,
        )

    def _stream(self, rank: int, world_size: int) -> StreamLoader:
        self._own_tokenizer = copy.deepcopy(self.tokenizer)  # for the thread that reads; they are not made for two
        shares = [source.weight for source in self.sources]
        names = ", ".join(f"{source.name} × {source.weight:g}" for source in self.sources)
        return StreamLoader(
            [RowStream(source.name, self.split, self.limit) for source in self.sources],
            shares,
            self._encode_block,
            self.stream_buffer,
            self.batch_size,
            seed=self.seed,
            pad_id=self._pad_id(),
            rank=rank,
            world_size=world_size,
            row_length=self.max_length if self.packing else None,
            length=ENDLESS if self.trainer is None else self.trainer.max_steps * self.trainer.accumulate_grad_batches,
            identity={
                "sources_named": names,
                "buffer": self.stream_buffer,
                "max_length": self.max_length,
                "val_size": None if self.val_sources else self.val_size,
                "stream_sample": self.stream_sample,
                "held_out": name_of(self._held),
            },
        )

    def _encode_block(self, records: list[Record]) -> list[Example]:
        """Examples of some records of a stream; those of validation are left out."""
        wanted = without_prompts(records, self._held)
        if not wanted:
            return []
        examples, _ = encode_records(wanted, self._own_tokenizer, max_length=self.max_length)
        self._check(examples)
        return examples

    def val_dataloader(self) -> FixedLoader | list[Batch]:
        if not self.val_examples:
            return []
        rank, world_size = self._place()
        place = {"pad_id": self._pad_id(), "rank": rank, "world_size": world_size}
        return FixedLoader(self.val_examples, self.val_batch_size, **place)

    def parts(self) -> list[Part]:
        """How many examples each source has, and its weight."""
        return [(source.report.examples, source.weight) for source in self.sources]

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often an epoch supervises each token on average, double [V]: what a draft vocabulary is chosen by."""
        counts = torch.zeros(vocab_size, dtype=torch.double)
        first = 0
        for count, weight in self.parts():
            examples = self.train_examples[first : first + count]
            first += count
            if not examples:
                continue
            supervised = torch.cat([example.tokens[example.supervised] for example in examples])
            _check_vocabulary(int(supervised.max()), vocab_size)
            counts += weight * torch.bincount(supervised, minlength=vocab_size)
        return counts

    def sample(self, count: int) -> list[Example]:
        """Training examples from the first on, evenly spaced, so that every source of some size is among them."""
        size = len(self.train_examples)
        return [self.train_examples[i * size // count] for i in range(count)] if count <= size else self.train_examples

    def preview(self, count: int = 1) -> list[str]:
        """A sample, decoded, with the supervised tokens between ⟦ and ⟧."""
        return [show(example, self.tokenizer) for example in self.sample(count)]

    def _encode(self, records: list[Record], before: int = 0, whole: int | None = None) -> Encoded:
        """Examples of these records. `before`: training records encoded earlier, of `whole`; None is validation."""

        def progress(done: int, _: int) -> None:
            if self.on_progress is not None and whole is not None:
                self.on_progress(before + done, whole)

        return encode_cached(
            records, self.tokenizer, max_length=self.max_length, folder=self.cache_dir, on_progress=progress
        )

    def _records(self) -> tuple[list[list[Record]], list[Record]]:
        """Training records by source, and validation records."""
        limit = min(self.limit or self.stream_sample, self.stream_sample) if self.streaming else self.limit
        found = read_sources(self.sources, self.split, limit, self.streaming)
        together = [record for records in found for record in records]
        if self.val_sources:
            val = [record for records in read_sources(self.val_sources, self.val_split, None) for record in records]
            held = {record.prompt_key for record in val}
            option, remedy = "data.val", "Give other records for one of the two"
        else:
            held = held_out(together, self.val_size)
            val = [record for record in together if record.prompt_key in held]
            option, remedy = (
                f"data.val_size is {self.val_size}, which",
                f"It must leave some of {len(together)} records, so lower it",
            )
        train = [without_prompts(records, held) for records in found]
        if not any(train):
            raise UserError(f"{option} takes every training record for validation. {remedy}.")
        self._held = held
        if self.val_sources:
            self.num_shared = len(together) - sum(map(len, train))
        return train, val

    def _check(self, examples: list[Example]) -> None:
        """UserError where the base cannot read the examples."""
        if self.vocab_size is not None:
            _check_vocabulary(max(int(example.tokens.max()) for example in examples), self.vocab_size)
        longest = max(map(len, examples))
        if self.context_length is not None and longest > self.context_length:
            told = f"data.max_length is {self.max_length} and the longest example has {longest} tokens"
            raise UserError(f"{told}; the base reads {self.context_length}: lower data.max_length to that or less.")

    def _place(self) -> tuple[int, int]:
        """(rank, number of ranks) of the trainer that this module is attached to."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _pad_id(self) -> int:
        pad_id: int | None = self.tokenizer.pad_token_id
        return 0 if pad_id is None else pad_id


def _check_vocabulary(largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise UserError(
            f"the training data hold token {largest}, and the base has a vocabulary of {vocab_size}; use the tokenizer "
            "that belongs to the base."
        )
