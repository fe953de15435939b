"""Batches: padding, order, the share of a rank, and a resumed run that sees exactly what an uninterrupted one sees."""

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mtp.errors import UserError
from train.chat import Example
from train.loader import FixedLoader, ResumableLoader, collate
from train.order import epoch_examples


def example(length: int, first: int = 5) -> Example:
    tokens = torch.arange(first, first + length, dtype=torch.int32)
    supervised = torch.arange(length) >= length // 2
    return Example(tokens, supervised, "d:1")


def examples(count: int) -> list[Example]:
    """Each with a first token of its own, and lengths in no order."""
    return [example(3 + (i * 7) % 11, first=100 * i) for i in range(count)]


def firsts(batch: dict[str, Any]) -> list[int]:
    return batch["tokens"][:, 0].tolist()


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_collate_pads_on_the_right_to_a_multiple_of_eight() -> None:
    batch = collate([[example(3)], [example(9)]], pad_id=1)
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        "tokens": ((2, 16), torch.long),
        "attention_mask": ((2, 16), torch.bool),
        "supervised": ((2, 16), torch.bool),
    }
    assert batch["tokens"][0].tolist() == [5, 6, 7] + [1] * 13
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 9]
    assert not bool((batch["supervised"] & ~batch["attention_mask"]).any())
    assert batch["supervised"][1, :9].tolist() == example(9).supervised.tolist()


def test_packed_rows_name_their_examples() -> None:
    rows = [[example(3), example(4, first=20), example(2, first=30)], [example(5, first=40)]]
    batch = collate(rows, pad_id=1, packed=True)
    assert batch["segments"].dtype == torch.long
    assert batch["segments"].tolist() == [[1] * 3 + [2] * 4 + [3] * 2 + [0] * 7, [1] * 5 + [0] * 11]
    assert batch["tokens"][0].tolist() == [5, 6, 7, 20, 21, 22, 23, 30, 31] + [1] * 7
    for name, value in collate([[example(5, first=40)]], pad_id=1).items():
        assert torch.equal(batch[name][1, :8], value[0]), name
    assert torch.equal(batch["attention_mask"], batch["segments"] > 0)


def test_loaders_know_their_length() -> None:
    for count in (1, 7, 8, 9, 33):
        for world_size in (1, 2, 3):
            for rank in range(world_size):
                for loader in (
                    FixedLoader(examples(count), 4, rank=rank, world_size=world_size),
                    ResumableLoader(examples(count), 4, rank=rank, world_size=world_size),
                ):
                    assert len(list(loader)) == len(loader)


def test_the_fixed_loader_repeats_itself() -> None:
    loader = FixedLoader(examples(10), 4)
    assert (
        [firsts(b) for b in loader]
        == [firsts(b) for b in loader]
        == [[0, 100, 200, 300], [400, 500, 600, 700], [800, 900]]
    )


# ---- resuming --------------------------------------------------------------------------------------------------------


def endless(loader: ResumableLoader) -> Any:
    while True:
        yield from loader


@pytest.mark.parametrize("stop", [0, 1, 4, 5, 6, 9, 10, 13])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_cursor_goes_on_where_it_was(stop: int, rank: int) -> None:
    def new() -> ResumableLoader:
        return ResumableLoader(examples(37), 4, seed=3, rank=rank, world_size=2)

    straight = [firsts(b) for b in islice(endless(new()), 20)]
    first = new()
    for _ in islice(endless(first), stop):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["batch"]) == (stop // 5, stop % 5)
    second = new()
    second.load_state_dict(state)
    assert [firsts(b) for b in islice(endless(second), 20 - stop)] == straight[stop:]


MIXED = {"parts": [(20, 0.3), (17, 1.5)], "row_length": 20}


@pytest.mark.parametrize("stop", range(0, 24, 3))
def test_a_packed_mixture_goes_on_where_it_was(stop: int) -> None:
    """Epochs of packed rows differ in length, and passes need not end where they do."""

    def new(rank: int = 1) -> ResumableLoader:
        return ResumableLoader(examples(37), 2, seed=3, rank=rank, world_size=2, **MIXED)

    straight = [b["tokens"].tolist() for b in islice(endless(new()), 24)]
    assert all(len(list(new(rank))) == len(new()) for rank in (0, 1))
    first, second = new(), new()
    for _ in islice(endless(first), stop):
        pass
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [b["tokens"].tolist() for b in islice(endless(second), 24 - stop)] == straight[stop:]
    assert first.epoch > 0 or stop < 6


def test_a_stream_of_packed_rows_holds_what_its_epochs_hold() -> None:
    loader = ResumableLoader(examples(37), 2, seed=3, **MIXED)
    seen: list[int] = []
    for batch in endless(loader):
        if loader.epoch == 3 or (loader.epoch, loader.batch) == (3, 0):
            break
        begins = batch["segments"].diff(dim=1, prepend=torch.zeros(len(batch["segments"]), 1).long()) > 0
        seen += batch["tokens"][begins].tolist()
    wanted = [100 * i for epoch in range(3) for i in epoch_examples(MIXED["parts"], seed=3, epoch=epoch)]
    assert len(seen) > len(wanted) - 8  # all but the last batch of epoch 2
    assert all(seen.count(i) <= wanted.count(i) for i in seen)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"examples": examples(21)}, "examples was 20 and is 21"),
        ({"examples": [*examples(19), example(5, first=7)]}, "data was"),
        ({"batch_size": 5}, "batch_size was 4 and is 5"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"parts": [(5, 1.0), (15, 2.0)]}, "mixture was 20 × 1 and is 5 × 1, 15 × 2"),
        ({"row_length": 30}, "row_length was 0 and is 30"),
    ],
)
def test_other_batches_are_refused_inside_an_epoch_and_allowed_between(changed: dict, complaint: str) -> None:
    settings_before = {"examples": examples(20), "batch_size": 4, "seed": 0}
    loader = ResumableLoader(**settings_before)
    next(iter(loader))
    other = ResumableLoader(**(settings_before | changed))
    with pytest.raises(UserError, match=complaint):
        other.load_state_dict(loader.state_dict())
    loader = ResumableLoader(**settings_before)
    list(loader)
    other.load_state_dict(loader.state_dict())
    assert (other.epoch, other.batch) == (1, 0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("packing", [None, 20])
def test_ranks_share_an_epoch_and_the_rest_is_blank(ranks: int, packing: int | None) -> None:
    """Also more ranks than batches."""

    def new(rank: int, count: int) -> ResumableLoader:
        return ResumableLoader(examples(17), 4, seed=3, rank=rank, world_size=count, row_length=packing)

    alone = list(new(0, 1))
    shares = [list(new(rank, ranks)) for rank in range(ranks)]
    assert {len(share) for share in shares} == {-(-len(alone) // ranks)}
    steps = [batch for step in zip(*shares, strict=True) for batch in step]
    for batch, own in zip(steps, alone, strict=False):
        assert all(torch.equal(batch[name], own[name]) for name in own)
    for batch in steps[len(alone) :]:
        assert not batch["supervised"].any()
        assert not batch["attention_mask"].any()
        assert batch["tokens"].shape == batch["supervised"].shape
    fixed = [list(FixedLoader(examples(17), 4, rank=rank, world_size=ranks)) for rank in range(ranks)]
    marks = sum(int(batch["supervised"].sum()) for share in fixed for batch in share)
    assert marks == sum(int(example.supervised.sum()) for example in examples(17)), "each counted once"


@pytest.mark.parametrize(("before", "steps", "now"), [(2, 3, 1), (2, 3, 3), (1, 4, 2), (4, 1, 2), (3, 0, 2)])
def test_another_number_of_ranks_goes_on_from_there(before: int, steps: int, now: int) -> None:
    straight = [firsts(b) for b in ResumableLoader(examples(60), 4, seed=3)]
    first = ResumableLoader(examples(60), 4, seed=3, world_size=before)
    for _ in islice(endless(first), steps):
        pass
    second = ResumableLoader(examples(60), 4, seed=3, world_size=now)
    second.load_state_dict(first.state_dict())
    assert firsts(next(iter(second))) == straight[before * steps]


def test_a_place_that_ranks_cannot_share_is_refused() -> None:
    first = ResumableLoader(examples(60), 4, seed=3)
    for _ in islice(endless(first), 3):
        pass
    with pytest.raises(UserError, match="after 3 batches on 1 processes, which 2 cannot share; resume on 1"):
        ResumableLoader(examples(60), 4, seed=3, world_size=2).load_state_dict(first.state_dict())


class Watcher(lightning.LightningModule):
    """Learns nothing, remembers the first token of every sequence it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []
        self.validated: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.seen.append(firsts(batch))
        return self.weight.sum()

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(len(self.seen))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Loaders(lightning.LightningDataModule):
    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(examples(20), 4, seed=7)

    def val_dataloader(self) -> FixedLoader:
        return FixedLoader(examples(3), 2)


def fit(folder: Path, steps: int, ckpt: str | None = None, **options: Any) -> Watcher:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    module = Watcher()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            logger=False,
            callbacks=[keep],
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **options,
        )
        trainer.fit(module, datamodule=Loaders(), ckpt_path=ckpt)
    return module


@pytest.mark.parametrize(
    "options",
    [
        {"limit_val_batches": 0},
        {},
        {"val_check_interval": 2},
        {"limit_train_batches": 3},
        {"accumulate_grad_batches": 2},
    ],
    ids=["plain", "validate", "validate-often", "limited", "accumulate"],
)
def test_a_resumed_trainer_sees_the_same_batches(tmp_path: Path, options: dict[str, Any]) -> None:
    """Five batches an epoch (or three of them); stopped inside the first, at its end, and inside the second epoch."""
    steps, per_step = 11, options.get("accumulate_grad_batches", 1)
    straight = fit(tmp_path / "a", steps, **options).seen
    plain = ResumableLoader(examples(20), 4, seed=7)
    assert straight[:3] == [firsts(b) for b in islice(plain, 3)]
    for stop in (2, 4, 5, 7, 10):
        first = fit(tmp_path / f"b{stop}", stop, **options)
        second = fit(tmp_path / f"c{stop}", steps, ckpt=str(tmp_path / f"b{stop}" / f"step={stop}.ckpt"), **options)
        assert first.seen + second.seen == straight, f"stopped at step {stop} ({per_step} batches a step)"


def test_a_loader_that_forgets_its_place_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control for the test above."""
    monkeypatch.setattr(ResumableLoader, "load_state_dict", lambda self, state: None)
    straight = fit(tmp_path / "a", 8).seen
    first = fit(tmp_path / "b", 4)
    second = fit(tmp_path / "c", 8, ckpt=str(tmp_path / "b" / "step=4.ckpt"))
    assert len(straight) == 8
    assert first.seen == straight[:4]
    assert second.seen != straight[4:]
