"""The optimiser: two that look like one, schedules that reach both, decay for matrices only, and resuming."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from mtp.config import HeadsOptions
from mtp.initialise import new_heads
from tests.mtp.heads_toys import KINDS
from tests.tiny import exact_base
from tests.train.runs import train
from train.optimizer import Joint, Muon, make_optimizer, orthogonal
from train.options import OptimizerOptions

MUON = OptimizerOptions(kind="muon", lr=0.1, weight_decay=0.5)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    rows = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(rows).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_is_in_one_group_and_only_matrices_decay(kind: str) -> None:
    model = network()
    optimizer = make_optimizer(model.parameters(), OptimizerOptions(kind=kind, weight_decay=0.5))  # type: ignore[arg-type]
    seen = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(map(id, seen)) == sorted(map(id, model.parameters()))
    for group in optimizer.param_groups:
        assert {parameter.ndim == 2 for parameter in group["params"]} == {group["weight_decay"] == 0.5}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moved = [not torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)]
    vectors_that_are_zero = [parameter.ndim != 2 for parameter in model.parameters()]
    assert moved == [not vector for vector in vectors_that_are_zero], "without gradient only decay moves anything"


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_parameters_of_one_sort_only(kind: str) -> None:
    options = OptimizerOptions(kind=kind)  # type: ignore[arg-type]
    for parameters in ([nn.Parameter(torch.ones(3, 4))], [nn.Parameter(torch.ones(4))]):
        optimizer = make_optimizer(parameters, options)
        parameters[0].grad = torch.ones_like(parameters[0])
        optimizer.step()
        assert not torch.equal(parameters[0], torch.ones_like(parameters[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_every_kind_go_to_muon(kind: str) -> None:
    heads = new_heads(HeadsOptions(kind=kind, draft_length=2), exact_base("llama"))  # type: ignore[arg-type]
    optimizer = make_optimizer(heads.parameters(), MUON)
    assert isinstance(optimizer, Joint)
    assert [type(part) for part in optimizer.parts] == [Muon, AdamW]
    for parameter in heads.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.detach().clone() for parameter in heads.parameters()]
    optimizer.step()
    assert all(not torch.equal(one, other) for one, other in zip(before, heads.parameters(), strict=True))


def test_a_schedule_reaches_both_parts() -> None:
    model = network()
    optimizer = make_optimizer(model.parameters(), MUON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert isinstance(optimizer, Joint)
    for number in range(3):
        for part in optimizer.parts:
            assert [group["lr"] for group in part.param_groups] == [0.1 * 0.5**number]
        step(model, optimizer, number)
        schedule.step()


def test_a_learning_rate_of_zero_stops_both_parts() -> None:
    """Negative control of the schedule: what it sets is what steps are made with."""
    model = network()
    optimizer = make_optimizer(model.parameters(), MUON)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, optimizer, 0)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def test_state_round_trip_goes_on_as_if_never_interrupted(tmp_path: Path) -> None:
    model = network()
    optimizer = make_optimizer(model.parameters(), MUON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for number in range(3):
        step(model, optimizer, number)
        schedule.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()},
        tmp_path / "state",
    )
    saved = torch.load(tmp_path / "state", weights_only=True)
    again, fresh = network(1), network(1)
    for other, state in ((again, True), (fresh, False)):
        other.load_state_dict(saved["model"])
        resumed = make_optimizer(other.parameters(), MUON)
        schedule_again = torch.optim.lr_scheduler.LambdaLR(resumed, lambda step: 0.9**step)
        if state:
            resumed.load_state_dict(saved["optimizer"])
        schedule_again.load_state_dict(saved["schedule"])
        for number in range(3, 6):
            if other is again:
                step(model, optimizer, number)
                schedule.step()
            step(other, resumed, number)
            schedule_again.step()
        if state:
            assert [group["lr"] for group in resumed.param_groups] == [group["lr"] for group in optimizer.param_groups]
    for one, same, unlike in zip(model.parameters(), again.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, unlike), "negative control: without its state the optimiser goes elsewhere"


def test_a_closure_runs_once_with_gradients() -> None:
    model, calls = network(), []
    optimizer = make_optimizer(model.parameters(), MUON)

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 6)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure)) > 0
    assert len(calls) == 1


def test_ten_steps_of_muon_are_five_and_five(tmp_path: Path) -> None:
    """Through trainer and checkpoint, at a constant rate, as `max_steps` shapes the schedule."""
    changes = {"model__optimizer__kind": "muon", "model__decode__prompts": None, "model__optimizer__weight_decay": 0.1}
    changes |= {"model__optimizer__warmup": 0.0, "model__optimizer__decay": 0.0, "run__checkpoint_every": 5}
    changes |= {"trainer__val_check_interval": 100, "trainer__max_steps": 10}
    whole = train(tmp_path, **changes)
    part = train(tmp_path, "--trainer.max_steps", "5", **changes)
    checkpoint = part / "checkpoints" / "last.ckpt"
    half = torch.load(checkpoint, weights_only=True)
    assert half["global_step"] == 5
    assert set(half["optimizer_states"][0]) == {"parts"}
    train(tmp_path, "--ckpt_path", str(checkpoint), **changes)
    one, other = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (whole, part)
    )
    moved = [name for name in one if not torch.equal(one[name], half["state_dict"][name])]
    assert {"heads.fc.weight", "heads.norm.weight"} <= set(moved)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_updates_are_close_to_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert 0.5 < float(values.min()) <= float(values.max()) < 1.3
    assert float(torch.linalg.svdvals(matrix).max()) > 1.5  # the matrix itself is not
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (orthogonal(matrix) - left @ right).abs().max() < 0.35


def test_muon_takes_the_steps_of_torchs_own() -> None:
    """Which rounds to bfloat16 on the way, hence the tolerance; another momentum would be further off."""
    start = torch.randn(6, 10, generator=torch.Generator().manual_seed(2))
    ours, theirs, other = (nn.Parameter(start.clone()) for _ in range(3))
    options = {"lr": 0.1, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    steppers = [Muon([ours], 0.1, 0.1), torch.optim.Muon([theirs], **options)]  # type: ignore[arg-type]
    steppers.append(torch.optim.Muon([other], momentum=0.5, **options))  # type: ignore[arg-type]
    for seed in range(4):
        for matrix in (ours, theirs, other):
            matrix.grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(seed))
        for stepper in steppers:
            stepper.step()
    assert (ours - theirs).abs().max() < 0.02
    assert (ours - other).abs().max() > 0.05
