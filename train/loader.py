"""Batches, and the order in which examples are seen.

Knows: padding, shuffling as a pure function of seed and epoch, the share of a rank, and how to go on inside an epoch.
Refuses to know: what the tokens mean, where the examples come from, and Lightning.
Sizes: B batch, S tokens of the longest example in a batch.
"""

import hashlib
import math
import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtp.errors import UserError
from train.chat import Example

Batch = dict[str, Tensor]  # tokens long [B, S], attention_mask bool [B, S], supervised bool [B, S]; padded on the right

WINDOW = 16  # batches among which examples are sorted by length: most padding goes, the order stays close to random
MULTIPLE = 8  # S is rounded up to this, so that few shapes occur


def collate(examples: Sequence[Example], pad_id: int) -> Batch:
    """One batch, padded on the right to a multiple of 8."""
    width = math.ceil(max(map(len, examples)) / MULTIPLE) * MULTIPLE
    tokens = torch.full((len(examples), width), pad_id, dtype=torch.long)
    attention_mask = torch.zeros(len(examples), width, dtype=torch.bool)
    supervised = torch.zeros(len(examples), width, dtype=torch.bool)
    for i, example in enumerate(examples):
        tokens[i, : len(example)] = example.tokens
        attention_mask[i, : len(example)] = True
        supervised[i, : len(example)] = example.supervised
    return {"tokens": tokens, "attention_mask": attention_mask, "supervised": supervised}


def epoch_order(lengths: Sequence[int], batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch as indices, each index once; depends on nothing but the arguments.

    Examples are shuffled, then sorted by length within windows of 16 batches, and the batches of a window are shuffled.
    """
    chance = random.Random(f"{seed}/{epoch}")  # a text seed is hashed, so neighbouring seeds and epochs share nothing
    order = list(range(len(lengths)))
    chance.shuffle(order)
    batches = []
    for start in range(0, len(order), batch_size * WINDOW):
        window = sorted(order[start : start + batch_size * WINDOW], key=lambda i: lengths[i])
        cut = [window[i : i + batch_size] for i in range(0, len(window), batch_size)]
        chance.shuffle(cut)
        batches += cut
    return batches


def rank_share(batches: Sequence[list[int]], rank: int, world_size: int) -> list[list[int]]:
    """Every `world_size`-th batch from `rank` on. Ranks get equally many: the first batches are repeated to fill up."""
    share = math.ceil(len(batches) / world_size)
    return [batches[(i * world_size + rank) % len(batches)] for i in range(share)]


class FixedLoader:
    """The examples in their own order, the same in every pass; for validation."""

    def __init__(
        self, examples: Sequence[Example], batch_size: int, *, pad_id: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        assert examples, "a loader needs examples"
        self.examples, self.batch_size, self.pad_id = examples, batch_size, pad_id
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.examples) / self.batch_size) / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        count, size = len(self.examples), self.batch_size
        batches = [list(range(i, min(i + size, count))) for i in range(0, count, size)]
        for indices in rank_share(batches, self.rank, self.world_size):
            yield collate([self.examples[i] for i in indices], self.pad_id)


class ResumableLoader:
    """A cursor on the endless stream epoch 0, epoch 1, …, for training.

    Each pass yields as many batches as an epoch has, from the cursor on. The cursor moves before a batch is handed out,
    so a state taken while that batch is in use names the next one. A pass that is left early (Lightning's
    `limit_train_batches`, a resumed run) loses nothing: the next pass goes on where it stopped.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        batch_size: int,
        *,
        seed: int = 0,
        pad_id: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        assert examples, "a loader needs examples"
        self.examples, self.batch_size, self.seed, self.pad_id = examples, batch_size, seed, pad_id
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.batch = 0
        self._lengths = [len(example) for example in examples]
        self._planned: tuple[int, list[list[int]]] | None = None
        self._digest: str | None = None

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.examples) / self.batch_size) / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            indices = self._order()[self.batch]
            self._advance()
            yield collate([self.examples[i] for i in indices], self.pad_id)

    def state_dict(self) -> dict[str, int | str]:
        """Where the next batch comes from, and what that place depends on. The same on every rank."""
        return {"epoch": self.epoch, "batch": self.batch, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Moves the cursor. Between epochs anything may have changed; inside one, other data is a UserError."""
        batch = int(state["batch"])
        changed = [key for key, value in self._identity().items() if state[key] != value]
        if batch and changed:
            now = self._identity()
            told = ", ".join(f"{key} was {state[key]} and is {now[key]}" for key in changed)
            remedy = "Resume with the same data and settings, or start a new run without --ckpt_path."
            raise UserError(f"the checkpoint stopped inside an epoch of other batches: {told}. {remedy}")
        self.epoch, self.batch = int(state["epoch"]), batch

    def _advance(self) -> None:
        self.batch += 1
        if self.batch == len(self):
            self.epoch, self.batch = self.epoch + 1, 0

    def _order(self) -> list[list[int]]:
        if self._planned is None or self._planned[0] != self.epoch:
            batches = epoch_order(self._lengths, self.batch_size, seed=self.seed, epoch=self.epoch)
            self._planned = (self.epoch, rank_share(batches, self.rank, self.world_size))
        return self._planned[1]

    def _identity(self) -> dict[str, int | str]:
        if self._digest is None:
            self._digest = _digest(self.examples)
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "world_size": self.world_size,
            "examples": len(self.examples),
            "data": self._digest,
        }


def _digest(examples: Sequence[Example]) -> str:
    """A short name for the examples: lengths, tokens and marks, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(example.tokens.numpy().tobytes())
        digest.update(example.supervised.numpy().tobytes())
    return digest.hexdigest()[:16]
