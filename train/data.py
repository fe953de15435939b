"""The Lightning data module: from names of sources to loaders.

Knows: which records are for training and which for validation, and which loader each of them gets.
Refuses to know: how records are read and marked (`train.records`, `train.chat`), and in which order batches come
(`train.loader`).
Sizes: V vocabulary.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import lightning
import torch
from torch import Tensor

from mtp.errors import UserError
from train.chat import DataReport, Example, encode_records, show
from train.loader import Batch, FixedLoader, ResumableLoader
from train.records import Record, read_records
from train.template import Tokenizer


def split_records(records: Sequence[Record], val_size: int) -> tuple[list[Record], list[Record]]:
    """(training, validation), with the first `val_size` records or a few more for validation.

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
    return without_prompts(records, held), [record for record in records if record.prompt_key in held]


def without_prompts(records: Sequence[Record], keys: set[str]) -> list[Record]:
    """The records whose prompt is not among `keys`."""
    return [record for record in records if record.prompt_key not in keys]


class ChatDataModule(lightning.LightningDataModule):
    """Records from files or `datasets`, encoded with the tokenizer of the base, in batches.

    Call `set_tokenizer` before `setup`. After `setup`: `train_examples`, `val_examples`, and `train_report`,
    `val_report` with the counts (`val_report` is None without validation), and `num_shared`, the number of training
    records left out because their prompt is in `val`.

    Args:
        train: Where training records come from: .jsonl files, other local data files, or Hub ids that `datasets` loads
            (`org/name` or `org/name:subset`). One or several.
        val: The same for validation. Records of `train` whose prompt also occurs here are left out.
        val_size: Without `val`: how many records of `train` are held out for validation. 0 means no validation.
        max_length: Longest sequence in tokens; what is longer is cut on the right.
        batch_size: Sequences in a training batch, on each device.
        val_batch_size: Sequences in a validation batch; by default as in training.
        seed: Decides the order of training batches.
        limit: Use only that many records of `train`, before anything is held out.
        split: The split of `train` sources that have splits.
        val_split: The split of `val` sources that have splits.
    """

    def __init__(
        self,
        train: list[str] | str,
        val: list[str] | str | None = None,
        val_size: int = 64,
        max_length: int = 512,
        batch_size: int = 8,
        val_batch_size: int | None = None,
        seed: int = 0,
        limit: int | None = None,
        split: str = "train",
        val_split: str = "validation",
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("val_size", val_size, 0),
            ("max_length", max_length, 2),
            ("batch_size", batch_size, 1),
            ("val_batch_size", 1 if val_batch_size is None else val_batch_size, 1),
            ("limit", 1 if limit is None else limit, 1),
        ):
            if value < least:
                raise UserError(f"data.{name} is {value}; allowed is {least} or more.")
        self.train_sources = [train] if isinstance(train, str) else list(train)
        self.val_sources = [val] if isinstance(val, str) else list(val or [])
        self.val_size, self.max_length, self.seed, self.limit = val_size, max_length, seed, limit
        self.batch_size, self.val_batch_size = batch_size, val_batch_size or batch_size
        self.split, self.val_split = split, val_split
        self.tokenizer: Tokenizer = None
        self.on_progress: Callable[[int, int], None] | None = None
        self.train_examples: list[Example] = []
        self.val_examples: list[Example] = []
        self.train_report = DataReport()
        self.val_report: DataReport | None = None
        self.num_shared = 0

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        """The tokenizer of the base; its chat template decides how records are rendered."""
        self.tokenizer = tokenizer

    def setup(self, stage: str | None = None) -> None:
        """Reads and encodes everything, once. `on_progress(done, total)` is told about the training records."""
        if self.train_examples:
            return
        assert self.tokenizer is not None, "set_tokenizer comes before setup"
        train, val = self._records()
        self.train_examples, self.train_report = encode_records(
            train, self.tokenizer, max_length=self.max_length, on_progress=self.on_progress
        )
        if val:
            self.val_examples, self.val_report = encode_records(val, self.tokenizer, max_length=self.max_length)

    def train_dataloader(self) -> ResumableLoader:
        rank, world_size = self._place()
        place = {"pad_id": self._pad_id(), "rank": rank, "world_size": world_size}
        return ResumableLoader(self.train_examples, self.batch_size, seed=self.seed, **place)

    def val_dataloader(self) -> FixedLoader | list[Batch]:
        if not self.val_examples:
            return []
        rank, world_size = self._place()
        place = {"pad_id": self._pad_id(), "rank": rank, "world_size": world_size}
        return FixedLoader(self.val_examples, self.val_batch_size, **place)

    def supervised_counts(self, vocab_size: int) -> Tensor:
        """How often each token is supervised in the training data, long [V]: what a draft vocabulary is chosen by."""
        if not self.train_examples:
            return torch.zeros(vocab_size, dtype=torch.long)
        supervised = torch.cat([example.tokens[example.supervised] for example in self.train_examples])
        if int(supervised.max()) >= vocab_size:
            raise UserError(
                f"the training data hold token {int(supervised.max())}, and the base has a vocabulary of {vocab_size}; "
                "use the tokenizer that belongs to the base."
            )
        return torch.bincount(supervised, minlength=vocab_size)

    def preview(self, count: int = 1) -> list[str]:
        """The first training examples, decoded, with the supervised tokens between ⟦ and ⟧."""
        return [show(example, self.tokenizer) for example in self.train_examples[:count]]

    def _records(self) -> tuple[list[Record], list[Record]]:
        records = _read_all(self.train_sources, self.split, self.limit)
        if self.val_sources:
            val = _read_all(self.val_sources, self.val_split, None)
            train = without_prompts(records, {record.prompt_key for record in val})
            self.num_shared = len(records) - len(train)
            option, remedy = "data.val", "Give other records for one of the two"
        else:
            train, val = split_records(records, self.val_size)
            option, remedy = (
                f"data.val_size is {self.val_size}, which",
                f"It must leave some of {len(records)} records, so lower it",
            )
        if not train:
            raise UserError(f"{option} takes every training record for validation. {remedy}.")
        return train, val

    def _place(self) -> tuple[int, int]:
        """(rank, number of ranks) of the trainer that this module is attached to."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _pad_id(self) -> int:
        pad_id: int | None = self.tokenizer.pad_token_id
        return 0 if pad_id is None else pad_id


def _read_all(sources: Sequence[str], split: str, limit: int | None) -> list[Record]:
    records: list[Record] = []
    for source in sources:
        left = None if limit is None else limit - len(records)
        if left == 0:
            break
        records += read_records(source, split=split, limit=left)
    return records


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
