"""Forwards with few rows: the same numbers up to rounding, and only where they apply."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from decode import skinny
from decode.skinny import SkinnyProducts, fast_products
from decode.target import BaseTarget
from mtp.output import project
from tests.tiny import tiny_base


@settings(deadline=None, max_examples=30)
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

    def spy(hidden: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
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
