"""The self-tests: each passes for every kind of heads and fails on the fault it is there for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import train.self_test as checks
from mtp.base import BaseOutput, FrozenBase
from mtp.config import HeadsOptions
from mtp.errors import UserError
from mtp.heads import Heads, MedusaHeads
from mtp.initialise import new_heads
from mtp.targets import TargetPlan, plan_targets
from tests.mtp.heads_toys import KINDS
from tests.tiny import tiny_base, tiny_model, tiny_tokenizer
from train.chat import Example
from train.loader import Batch, collate
from train.self_test import run_self_tests

K, PERIOD = 3, 12
PATTERN = torch.arange(10, 10 + PERIOD)


def periodic(length: int, phase: int = 0) -> torch.Tensor:
    return PATTERN[(torch.arange(length) + phase) % PERIOD]


@pytest.fixture(scope="module")
def knowing() -> FrozenBase:
    """A tiny base that was trained on a periodic text, until it knows what comes next."""
    torch.manual_seed(0)
    model = tiny_model("llama")
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 4.0)  # as that of trained bases: one that matters
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = torch.stack([periodic(32, phase) for phase in range(PERIOD)])
    for _ in range(60):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.3, "the base must know its text"
    return FrozenBase.from_model(model.eval(), tiny_tokenizer(), "knowing")


def text_batch(packed: bool = False, length: int = 40, prompt: int = 8) -> Batch:
    """Four periodic texts, in rows of their own or two to a row."""
    marks = torch.arange(length) >= prompt
    examples = [Example(periodic(length, phase).int(), marks, f"{phase}") for phase in range(4)]
    rows = [examples[:2], examples[2:]] if packed else [[example] for example in examples]
    return collate(rows, pad_id=0, packed=packed)


def heads_for(base: FrozenBase, kind: str, vocabulary: torch.Tensor | None = None, **options: Any) -> Heads:
    torch.manual_seed(0)
    return new_heads(HeadsOptions(kind=kind, draft_length=K, **options), base, vocabulary)  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_sound_heads_pass(kind: str, packed: bool, knowing: FrozenBase) -> None:
    for vocabulary in (None, torch.arange(0, 40)):
        lines = run_self_tests(knowing, heads_for(knowing, kind, vocabulary), [text_batch(packed)])
        assert len(lines) == 4
        assert not any("warning" in line for line in lines)
    heads = heads_for(knowing, kind)
    assert all(parameter.grad is None for parameter in heads.parameters()), "the checks leave nothing behind"


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gemma3", "gpt_neox"])
def test_random_bases_of_all_families_pass(family: str, tmp_path: Path) -> None:
    base = tiny_base(family, tmp_path)
    lines = run_self_tests(base, heads_for(base, "medusa"), [text_batch(length=60)])
    assert len([line for line in lines if "warning" not in line]) == 4


class Without(FrozenBase):
    """A base that hands out the state before its final norm, as a wrong idea of its layers would."""

    def forward(self, *args: Any, **kwargs: Any) -> BaseOutput:
        seen: list[torch.Tensor] = []
        hook = self.final_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            output = super().forward(*args, **kwargs)
        finally:
            hook.remove()
        return BaseOutput(hidden=seen[-1], features=seen[-1] if output.features.numel() else output.features)


def test_a_missing_final_norm_is_found() -> None:
    model = tiny_model("llama")
    torch.nn.init.uniform_(model.model.norm.weight, 0.2, 4.0)
    base = FrozenBase.from_model(model, tiny_tokenizer(), "with")
    heads, batch = heads_for(base, "medusa"), text_batch()
    run_self_tests(base, heads, [batch])
    with pytest.raises(UserError, match="a norm or a scale"):
        run_self_tests(Without.from_model(model, base.tokenizer, "without"), heads, [batch])


SHIFTS: dict[str, Callable[[TargetPlan], TargetPlan]] = {
    "target one late": lambda plan: replace(plan, teacher=plan.teacher - 1),
    "target one early": lambda plan: replace(plan, teacher=plan.teacher + 1),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shift", SHIFTS)
def test_shifted_targets_are_found(
    shift: str, packed: bool, knowing: FrozenBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "plan_targets", lambda *given: SHIFTS[shift](plan_targets(*given)))
    with pytest.raises(UserError, match="targets are out of step"):
        run_self_tests(knowing, heads_for(knowing, "medusa"), [text_batch(packed)])


@pytest.mark.parametrize("by", [-1, 1])
def test_tokens_one_place_off_what_the_base_reads_are_found(by: int, knowing: FrozenBase) -> None:
    """The same fault on the base's side: its states belong to the neighbouring tokens."""
    heads, batch = heads_for(knowing, "medusa"), text_batch()

    class Shifted(FrozenBase):
        def forward(self, *args: Any, **kwargs: Any) -> BaseOutput:
            output = super().forward(*args, **kwargs)
            return BaseOutput(hidden=output.hidden.roll(by, 1), features=output.features.roll(by, 1))

    with pytest.raises(UserError, match="self-test"):
        run_self_tests(Shifted.from_model(knowing.model, knowing.tokenizer, "shifted"), heads, [batch])


def test_text_that_the_base_would_not_write_is_told(knowing: FrozenBase, tmp_path: Path) -> None:
    batch = text_batch()
    batch["tokens"] = torch.randint(3, 60, batch["tokens"].shape, generator=torch.Generator().manual_seed(0))
    lines = run_self_tests(knowing, heads_for(knowing, "medusa"), [batch])
    assert any("mtp-train regenerate" in line for line in lines)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_without_gradient_is_found(kind: str, knowing: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_for(knowing, kind)
    whole = type(heads)._unroll

    def cut(self: Heads, *given: Any) -> torch.Tensor:
        states = whole(self, *given)
        return torch.cat([states[:, :, : K - 1], states[:, :, K - 1 :].detach()], dim=2)

    monkeypatch.setattr(type(heads), "_unroll", cut)
    with pytest.raises(UserError, match="draft position 3 of 3"):
        run_self_tests(knowing, heads, [text_batch()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_part_of_a_head_is_found(kind: str, knowing: FrozenBase) -> None:
    """Position K still has a gradient through the other parameters; only the names tell."""
    heads = heads_for(knowing, kind)
    name, parameter = list(heads.named_parameters())[-1]
    parameter.requires_grad_(False)
    with pytest.raises(UserError, match="reaches 1 parameters|draft position 3 of 3") as caught:
        run_self_tests(knowing, heads, [text_batch()])
    assert name in str(caught.value) or "draft position" in str(caught.value)


def test_answers_too_short_for_the_last_position_are_found(knowing: FrozenBase) -> None:
    heads = heads_for(knowing, "recurrent")
    with pytest.raises(UserError, match="draft position 3 of 3.*longer answers"):
        run_self_tests(knowing, heads, [text_batch(length=10)])
    run_self_tests(knowing, heads, [text_batch(length=10), text_batch(length=11)])  # one long answer is enough


@pytest.mark.parametrize("kind", ["recurrent", "hydra", "sequential"])
def test_decoding_that_reads_other_tokens_than_training_is_found(
    kind: str, knowing: FrozenBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = heads_for(knowing, kind)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    run_self_tests(knowing, heads, [text_batch()])
    monkeypatch.setattr(checks, "pad_for_drafts", lambda tokens, k: torch.nn.functional.pad(tokens[:, 1:], (0, k + 1)))
    whole = type(heads).ingest
    monkeypatch.setattr(
        type(heads), "ingest", lambda self, state, features, tokens: whole(self, state, features, tokens.roll(1, 1))
    )
    with pytest.raises(UserError, match="q of decoding differs"):
        run_self_tests(knowing, heads, [text_batch()])


def test_decoding_that_reads_another_layer_is_found(knowing: FrozenBase, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = heads_for(knowing, "medusa")
    forward = FrozenBase.forward

    def off_by_one(self: FrozenBase, tokens: torch.Tensor, **given: Any) -> BaseOutput:
        if given.get("cache") is not None:
            given["feature_layers"] = [layer - 1 for layer in given["feature_layers"]]
        return forward(self, tokens, **given)

    monkeypatch.setattr(FrozenBase, "forward", off_by_one)
    with pytest.raises(UserError, match="q of decoding differs"):
        run_self_tests(knowing, heads, [text_batch()])
    assert isinstance(heads, MedusaHeads)
