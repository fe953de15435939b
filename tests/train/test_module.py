"""The Lightning module: the base stays as it was, and the step does not depend on how a batch is cut."""

from collections.abc import Iterator
from pathlib import Path

import lightning
import pytest
import torch

from mtp.base import FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import RecurrentHeads
from mtp.losses import LossOptions
from mtp.objective import DraftSums
from tests.tiny import exact_base, tiny_base
from tests.train.runs import read_metrics, train, write_data
from train import module as module_file
from train.data import ChatDataModule
from train.loader import Batch, collate
from train.module import HeadsModule
from train.options import OptimizerOptions, learning_rate_share
from train.run import read_record
from train.start import start_heads
from train.summary import DECODED, MONITOR, best_line, doubt


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


def run(
    base: FrozenBase,
    batches: list[Batch],
    data: ChatDataModule,
    accumulate: int,
    steps: int = 1,
    clip: float | None = 1.0,
) -> HeadsModule:
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
        gradient_clip_val=clip,
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


def reported(tmp_path: Path, **changes: object) -> list[dict[str, float]]:
    """All metrics of a short run by row."""
    rows = read_metrics(train(tmp_path, **changes))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def test_metrics_say_what_their_names_say(tmp_path: Path) -> None:
    rows = reported(tmp_path, model__heads__draft_length=3, model__decode__prompts=None)
    for row in (row for row in rows if "val/loss" in row):
        alpha = [row[f"val/alpha/{k}"] for k in (1, 2, 3)]
        cumulative = [row[f"val/cumulative/{k}"] for k in (1, 2, 3)]
        assert cumulative == pytest.approx([alpha[0], alpha[0] * alpha[1], alpha[0] * alpha[1] * alpha[2]])
        assert row["val/accept_len_implied"] == pytest.approx(1 + sum(cumulative))
        assert 0 < row["val/draft_vocab_coverage"] <= 1
    steps = [row for row in rows if "train/loss" in row]
    assert len(steps) == 6
    for row in steps:
        assert 0 < row["train/peak_share"] < 1
        assert all(row[f"train/grad_norm/{k}"] > 0 for k in (1, 2, 3))
        assert row["train/grad_norm"] > 0
    shares = [row["train/peak_share"] / row["train/tokens_per_s"] for row in steps]
    assert shares == pytest.approx([shares[0]] * 6), "operations per token over the peak is one number"


def test_coverage_of_a_small_draft_vocabulary_is_that_of_the_data(data: ChatDataModule, tmp_path: Path) -> None:
    module = HeadsModule(heads=HeadsOptions(draft_length=2, draft_vocab_size=12))
    module.attach(tiny_base("llama", tmp_path))
    module.build(data)
    assert module.trained.draft_ids is not None
    supervised = torch.cat([example.tokens[example.supervised] for example in data.train_examples])
    share = torch.isin(supervised.long(), module.trained.draft_ids).double().mean()
    assert module.vocab_coverage == pytest.approx(float(share))
    assert 0.1 < module.vocab_coverage < 0.9


def test_the_gradients_norm_is_that_of_the_step(tmp_path: Path, data: ChatDataModule) -> None:
    """Plain descent with rate 1 and without clipping moves the weights by the gradient itself."""
    base = tiny_base("llama", tmp_path)
    batch = next(iter(data.train_dataloader()))
    before, after = (run(base, [batch], data, 1, steps=steps, clip=None) for steps in (0, 1))
    moved = [
        (one - other).flatten()
        for one, other in zip(before.trained.parameters(), after.trained.parameters(), strict=True)
    ]
    assert after._grad_norm == pytest.approx(float(torch.cat(moved).norm()), rel=1e-4)
    clipped = run(base, [batch], data, 1, clip=1e-3)
    assert clipped._grad_norm == pytest.approx(after._grad_norm), "before clipping"


def test_a_position_that_no_answer_reaches_has_no_gradient(tmp_path: Path, data: ChatDataModule) -> None:
    """Two supervised tokens teach positions 1 and 2; the norm of position 3 is zero then, and only then."""
    base = tiny_base("llama", tmp_path)
    for supervised, taught in ((2, 2), (3, 3)):
        batch = next(iter(data.train_dataloader()))
        batch["supervised"] = torch.zeros_like(batch["supervised"])
        batch["supervised"][:, 5 : 5 + supervised] = True
        module = HeadsModule(heads=HeadsOptions(draft_length=3), start_positions=0)
        module.attach(base)
        module.build(data)
        sums = module.draft_sums(batch)
        sums.total.backward()
        module.meter.add(sums.detached(), batch)
        norms = [module.meter.metrics()[f"train/grad_norm/{k}"] for k in (1, 2, 3)]
        assert [norm > 0 for norm in norms] == [k <= taught for k in (1, 2, 3)]


def test_running_acceptance_stays_where_nothing_was_seen(tmp_path: Path, data: ChatDataModule) -> None:
    base = tiny_base("llama", tmp_path)
    batch = next(iter(data.train_dataloader()))
    batch["supervised"] = torch.zeros_like(batch["supervised"])
    batch["supervised"][:, 5] = True  # position 1 only
    module = run(base, [batch], data, 1)
    assert module.running_alpha[0] > 0
    assert module.running_alpha[1] == 0
    module.running_alpha[:] = 0.5
    again = next(iter(data.train_dataloader())) | {"supervised": batch["supervised"]}
    module._step = module.draft_sums(again).detached()
    module.on_before_optimizer_step(module.trainer.optimizers[0])
    assert module.running_alpha[0] != 0.5
    assert module.running_alpha[1] == 0.5


def test_the_closed_form_start_needs_something_to_draft(tmp_path: Path, data: ChatDataModule) -> None:
    module = HeadsModule(heads=HeadsOptions(draft_length=2))
    module.attach(tiny_base("llama", tmp_path))
    module.build(data)
    assert isinstance(module.trained, RecurrentHeads)
    batch = next(iter(data.train_dataloader()))
    told: list[tuple[int, int]] = []
    start_heads(module.trained, module.base, [batch, batch, batch], 60, lambda done, total: told.append((done, total)))
    assert [done == total for done, total in told] == [False] * (len(told) - 1) + [True]
    assert 60 <= told[-1][0] < 60 + int(batch["supervised"].sum())
    batch["supervised"] = torch.zeros_like(batch["supervised"])
    with pytest.raises(UserError, match="nothing can be drafted"):
        start_heads(module.trained, module.base, [batch], 60)


def test_the_best_heads_are_confirmed_by_decoding() -> None:
    best = {"step": 400.0, MONITOR: 1.834, DECODED: 1.79}
    assert best_line(best) == "best heads: acceptance length implied 1.83, decoded 1.79, at step 400"
    assert best_line({"step": 400.0, MONITOR: 1.834}) == "best heads: acceptance length implied 1.83, at step 400"
    assert best_line({}) is None
    assert doubt(best, {"step": 400.0, DECODED: 1.79}) is None
    assert doubt(best, {"step": 200.0, DECODED: 2.05}) is None, "within 15 %"
    said = doubt(best, {"step": 200.0, DECODED: 2.2})
    assert said is not None
    assert "step 400) decode 1.79" in said
    assert "step 200 decoded 2.20" in said
    assert doubt({"step": 400.0, MONITOR: 1.8}, {"step": 200.0, DECODED: 2.2}) is None


def test_a_choice_that_decoding_contradicts_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first validation decodes 2.5 tokens a step, the second, which implies more, 1.2; a NaN is never the best."""
    lengths, implied = iter([2.5, 1.2, 1.2]), iter([1.1, 1.5, float("nan")])
    monkeypatch.setattr("train.module.decode_metrics", lambda stats: {DECODED: next(lengths)})
    whole = module_file.summarise

    def told(sums: DraftSums, prefix: str) -> dict[str, float]:
        return whole(sums, prefix) | ({MONITOR: next(implied)} if prefix == "val" else {})

    monkeypatch.setattr("train.module.summarise", told)
    folder = train(tmp_path, trainer__max_steps=9)
    said = capsys.readouterr().out
    assert said.count("warning: the best heads by val/alpha (step 6) decode 1.20") == 2, "when saved, and at the end"
    assert "best heads: acceptance length implied 1.50, decoded 1.20, at step 6" in said
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["ExportHeads"]
    assert saved["longest"] == {"step": 3, DECODED: 2.5}
    assert saved["metrics"][MONITOR] == 1.5
    assert read_record(folder)["best"]["step"] == 6
