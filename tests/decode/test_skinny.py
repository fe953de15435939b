"""Forwards with few rows: the same numbers up to rounding, and only where they apply."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from decode import skinny
from decode.skinny import SkinnyProducts, fast_products
from decode.target import BaseTarget
from mtp import output
from mtp.output import exchange_pays, exchanged, project
from tests.tiny import tiny_base


@pytest.fixture(autouse=True)
def it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whichever CPU the tests run."""
    for module in (output, skinny):
        monkeypatch.setattr(module, "exchange_pays", lambda _: True)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(rows=st.integers(1, 20), inputs=st.integers(1, 9), outputs=st.integers(1, 9), bias=st.booleans())
def test_equal_up_to_rounding_and_contiguous(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    layer = nn.Linear(inputs, outputs, bias=bias)
    x = torch.randn(1, rows, inputs)
    with torch.no_grad():
        expected = layer(x)
        with SkinnyProducts():
            found = layer(x)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("rows", "used"), [(1, False), (2, True), (16, True), (17, False)])
def test_where_it_applies(rows: int, used: bool) -> None:
    assert isinstance(fast_products(torch.zeros(1, rows)), SkinnyProducts) == used
    assert not isinstance(fast_products(torch.zeros(1, rows, device="meta")), SkinnyProducts)


def test_the_base_uses_it_when_it_verifies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shapes = []

    def spy(hidden: Tensor, matrix: Tensor, bias: Tensor | None, _: None) -> Tensor:
        shapes.append(tuple(hidden.shape[:-1]))
        return project(hidden, matrix, bias)

    monkeypatch.setattr(skinny, "project", spy)
    target = BaseTarget(tiny_base("llama", tmp_path))
    with torch.no_grad():
        target.start(())
        target.forward(torch.tensor([[3]]), 1)
        assert not shapes
        target.forward(torch.tensor([[4, 5, 6]]), 3)
    assert shapes == [(1, 3)] * (7 * 4)  # the seven projections of four layers
    nn.Linear(3, 2)(torch.ones(4, 3))
    assert len(shapes) == 7 * 4  # nothing stays behind


def test_where_it_does_not_pay_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (output, skinny):
        monkeypatch.setattr(module, "exchange_pays", lambda _: False)
    monkeypatch.setattr(output, "exchanged", lambda *_: pytest.fail("the operands were exchanged"))
    assert not isinstance(fast_products(torch.zeros(1, 4)), SkinnyProducts)
    rows, matrix = torch.randn(4, 3), torch.randn(5, 3)
    assert project(rows, matrix, None).equal(torch.nn.functional.linear(rows, matrix))


def test_what_pays_is_measured_once_per_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that charges one way only decides it."""
    now = [0.0]
    monkeypatch.setattr(output.time, "perf_counter", lambda: now[0])
    for slow, pays in ((exchanged, False), (torch.nn.functional.linear, True)):

        def charged(*arguments: Tensor, slow: Callable[..., Tensor] = slow) -> Tensor:
            now[0] += 1
            return slow(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(output if slow is exchanged else output.F, slow.__name__, charged)
            exchange_pays.cache_clear()
            assert exchange_pays(1) is pays
            before = now[0]
            assert exchange_pays(1) is pays
            assert now[0] == before
    exchange_pays.cache_clear()
