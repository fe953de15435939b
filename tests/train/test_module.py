"""The Lightning module: the base stays as it was, and the step does not depend on how a batch is cut."""

from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch

from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.losses import LossOptions
from tests.tiny import exact_base, tiny_base
from tests.train.runs import write_data
from train.data import ChatDataModule
from train.loader import Batch, collate
from train.module import HeadsModule
from train.options import OptimizerOptions, learning_rate_share


class PlainSteps(HeadsModule):
    """Gradient descent, so that a step shows the gradient itself."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trained.parameters(), lr=1.0)


class Fixed:
    """These batches, once. (Lightning reads a bare list as several loaders.)"""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def run(base: FrozenBase, batches: list[Batch], data: ChatDataModule, accumulate: int, steps: int = 1) -> HeadsModule:
    torch.manual_seed(0)
    options = HeadsOptions(draft_length=2, draft_vocab_size=40)
    module = PlainSteps(heads=options, loss=LossOptions(chunk=8), start_positions=0)
    module.attach(base)
    trainer = lightning.Trainer(
        max_steps=steps,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        gradient_clip_val=1.0,
    )
    data.train_dataloader = lambda: Fixed(batches)  # type: ignore[assignment, return-value]
    data.val_dataloader = lambda: []  # type: ignore[method-assign]
    trainer.fit(module, datamodule=data)
    return module


@pytest.fixture
def data(tmp_path: Path) -> ChatDataModule:
    module = ChatDataModule(train=str(write_data(tmp_path / "data.jsonl")), val_size=4, batch_size=4)
    module.set_tokenizer(tiny_base("llama", tmp_path).tokenizer)
    module.setup()
    return module


def test_one_batch_of_four_equals_four_of_one(tmp_path: Path, data: ChatDataModule) -> None:
    base = tiny_base("llama", tmp_path)
    whole = next(iter(data.train_dataloader()))
    rows = [{name: tensor[i : i + 1] for name, tensor in whole.items()} for i in range(4)]
    rows[1] = {name: torch.nn.functional.pad(tensor, (0, 7)) for name, tensor in rows[1].items()}
    together, apart = run(base, [whole], data, 1), run(base, rows, data, 4)
    start = run(base, [whole], data, 1, steps=0)
    for (name, one), other, before in zip(
        together.trained.named_parameters(), apart.trained.parameters(), start.trained.parameters(), strict=True
    ):
        assert (one - other).abs().max() < 1e-6, name
        assert (one - before).abs().max() > 0, name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_packed_and_padded_rows_have_the_same_loss_and_gradient(kind: str, family: str, data: ChatDataModule) -> None:
    base = exact_base(family)
    module = HeadsModule(heads=HeadsOptions(kind=kind, draft_length=3, draft_vocab_size=40))
    module.attach(base)
    module.build(data)
    module.trained.double()
    with torch.no_grad():  # away from a start at which much is zero
        for parameter in module.trained.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    module.trained.bind(base.embedding, base.output_matrix)
    found = []
    examples = data.train_examples[:6]
    for rows, packed in (([[e] for e in examples], False), ([examples[:3], examples[3:5], examples[5:]], True)):
        module.zero_grad()
        batch = collate(rows, pad_id=0, packed=packed)
        sums = module.draft_sums(batch)
        sums.total.backward()
        gradient = torch.cat([p.grad.flatten() for p in module.trained.parameters() if p.grad is not None])
        found.append((sums.detached(), gradient))
        if packed:  # negative control: packed rows without their segments have another loss
            del batch["segments"]
            mixed = module.draft_sums(batch).detached()
            assert abs(float(mixed.total - sums.detached().total)) > 1e-3
    (padded, one), (packed_sums, other) = found
    for name, value in vars(padded).items():
        assert torch.as_tensor(value).double().allclose(torch.as_tensor(getattr(packed_sums, name)).double()), name
    assert float((one - other).norm() / one.norm()) < 1e-6


def test_training_leaves_the_base_bit_identical(tmp_path: Path, data: ChatDataModule) -> None:
    base = tiny_base("llama", tmp_path)
    before = base.checksum()
    run(base, list(data.train_dataloader()), data, 1, steps=4)
    assert base.checksum() == before
    with torch.no_grad():  # negative control: the checksum sees one weight
        next(base.model.parameters())[0, 0] += 1e-3
    assert base.checksum() != before


def test_schedule() -> None:
    options = OptimizerOptions(warmup=0.1, final_lr_share=0.1)
    shares = [learning_rate_share(step, 100, options) for step in range(100)]
    assert shares[0] == pytest.approx(1 / 11)
    assert max(shares) == shares[10] == 1.0
    assert shares == sorted(shares[:11]) + sorted(shares[11:], reverse=True)
    assert 0.1 <= shares[-1] < 0.11
