"""Batches, and a cursor on the endless stream of them.

Knows: padding, packed rows, and how to go on inside an epoch.
Refuses to know: what the tokens mean, where the examples come from, in which order they come (`train.order`), and
Lightning.
Sizes: B batch, S tokens of the longest row in a batch.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtp.errors import UserError
from train.chat import Example
from train.order import Part, Row, epoch_order, rank_share

# tokens long [B, S], attention_mask bool [B, S], supervised bool [B, S], all padded on the right. With packing also
# segments long [B, S]: 0 is padding, 1, 2, … are the examples of a row. In training also examples long [B, n]: which
# examples a row holds, -1 is none. A rank that has no batch left while others have gets one of an example in which
# nothing is supervised and no token counts: it takes part in the step and changes nothing.
Batch = dict[str, Tensor]

MULTIPLE = 8  # S is rounded up to this, so that few shapes occur


def collate(rows: Sequence[Sequence[Example]], pad_id: int, *, packed: bool = False) -> Batch:
    """One batch, padded on the right to a multiple of 8. Only packed rows may hold several examples."""
    assert packed or all(len(row) == 1 for row in rows)
    width = math.ceil(max(sum(map(len, row)) for row in rows) / MULTIPLE) * MULTIPLE
    tokens = torch.full((len(rows), width), pad_id, dtype=torch.long)
    segments = torch.zeros(len(rows), width, dtype=torch.long)
    supervised = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        start = 0
        for number, example in enumerate(row, start=1):
            place = slice(start, start + len(example))
            tokens[i, place], supervised[i, place], segments[i, place] = example.tokens, example.supervised, number
            start += len(example)
    batch = {"tokens": tokens, "attention_mask": segments > 0, "supervised": supervised}
    return batch | {"segments": segments} if packed else batch


def blank(batch: Batch) -> Batch:
    """The same shapes, from which nothing is learned and nothing counted."""
    marks = ("attention_mask", "supervised")
    return {name: torch.zeros_like(tensor) if name in marks else tensor for name, tensor in batch.items()}


class FixedLoader:
    """The examples in their own order, one a row, the same in every pass; for validation."""

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
        batches = [[[j] for j in range(i, min(i + size, count))] for i in range(0, count, size)]
        for rows in rank_share(batches, self.rank, self.world_size):
            batch = collate([[self.examples[i] for i in row] for row in rows or [[0]]], self.pad_id)
            yield batch if rows else blank(batch)


class ResumableLoader:
    """A cursor on the endless stream epoch 0, epoch 1, …, for training.

    Each pass yields as many batches as epoch 0 has, from the cursor on. (Packing may fill a few rows more or fewer in
    another epoch.) The cursor moves before a batch is handed out, so a state taken while that batch is in use names the
    next one. A pass that is left early (Lightning's `limit_train_batches`, a resumed run) loses nothing: the next pass
    goes on where it stopped.

    `parts`: size and weight of each source, in the order of the examples; None is one source. `row_length`: tokens of a
    packed row; None is one example a row.
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
        parts: Sequence[Part] | None = None,
        row_length: int | None = None,
    ) -> None:
        assert examples, "a loader needs examples"
        self.examples, self.batch_size, self.seed, self.pad_id = examples, batch_size, seed, pad_id
        self.rank, self.world_size = rank, world_size
        self.parts: list[Part] = [(len(examples), 1.0)] if parts is None else list(parts)
        assert sum(count for count, _ in self.parts) == len(examples)
        self.row_length = row_length
        self.epoch = 0
        self.batch = 0
        self._lengths = [len(example) for example in examples]
        self._planned: tuple[int, list[list[Row]]] | None = None
        self._digest: str | None = None
        self._pass_length = len(self._order())

    def __len__(self) -> int:
        return self._pass_length

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            rows = self._order()[self.batch]
            self._advance()
            yield self._collated(rows) if rows else blank(self._collated([[0]]))

    def _collated(self, rows: list[Row]) -> Batch:
        packed = self.row_length is not None
        batch = collate([[self.examples[i] for i in row] for row in rows], self.pad_id, packed=packed)
        names = [torch.tensor(row) for row in rows]
        return batch | {"examples": torch.nn.utils.rnn.pad_sequence(names, batch_first=True, padding_value=-1)}

    def state_dict(self) -> dict[str, int | str]:
        """Where the next batch comes from, and what that place depends on. The same on every rank."""
        return {"epoch": self.epoch, "batch": self.batch, "world_size": self.world_size, **self._identity()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Moves the cursor. Between epochs anything may have changed; inside one, other data is a UserError. Another
        number of ranks is not, where it comes out even: the batches of all ranks are the same."""
        if "world_size" not in state:
            raise UserError("the checkpoint is of a run with data.streaming; resume with it true.")
        now = self._identity()
        batch = rescaled(int(state["batch"]), int(state["world_size"]), self.world_size)
        changed = [key for key, value in now.items() if state.get(key) != value]
        if batch and changed:
            told = ", ".join(f"{key} was {state.get(key)} and is {now[key]}" for key in changed)
            remedy = "Resume with the same data and settings, or start a new run without --ckpt_path."
            raise UserError(f"the checkpoint stopped inside an epoch of other batches: {told}. {remedy}")
        self.epoch, self.batch = int(state["epoch"]), batch

    def _advance(self) -> None:
        self.batch += 1
        if self.batch == len(self._order()):
            self.epoch, self.batch = self.epoch + 1, 0

    def _order(self) -> list[list[Row]]:
        if self._planned is None or self._planned[0] != self.epoch:
            batches = epoch_order(
                self._lengths,
                self.batch_size,
                seed=self.seed,
                epoch=self.epoch,
                parts=self.parts,
                row_length=self.row_length,
            )
            self._planned = (self.epoch, rank_share(batches, self.rank, self.world_size))
        return self._planned[1]

    def _identity(self) -> dict[str, int | str]:
        if self._digest is None:
            self._digest = digest_of(self.examples)
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "examples": len(self.examples),
            "data": self._digest,
            "mixture": ", ".join(f"{count} × {weight:g}" for count, weight in self.parts),
            "row_length": self.row_length or 0,
        }


def rescaled(batches: int, before: int, now: int) -> int:
    """How many batches each of `now` ranks has taken when each of `before` has taken so many. UserError where ranks
    would differ."""
    taken, rest = divmod(batches * before, now)
    if rest:
        raise UserError(
            f"the checkpoint stopped after {batches * before} batches on {before} processes, which {now} cannot share; "
            f"resume on {before}, or on another number that divides it (trainer.devices, trainer.num_nodes)."
        )
    return taken


def digest_of(examples: Sequence[Example]) -> str:
    """A short name for the examples: lengths, tokens and marks, in order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example).to_bytes(8, "little"))
        digest.update(example.tokens.numpy().tobytes())
        digest.update(example.supervised.numpy().tobytes())
    return digest.hexdigest()[:16]
