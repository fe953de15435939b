"""Memory that runs out while a text is decoded."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from decode import shortage
from decode.shortage import explained, place_bytes
from mtp.errors import UserError
from tests.tiny import tiny_base


def failing(error: Exception) -> Iterator[int]:
    yield 1
    raise error


def test_what_fits_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("llama", tmp_path)
    cache = base.new_cache()
    base.forward(torch.zeros(1, 128, dtype=torch.long), cache=cache)
    each = sum(buffer[:, :, :1].nbytes for layer in cache.layers for buffer in layer._buffers or ())
    assert place_bytes(base) == each
    monkeypatch.setattr(shortage, "free_memory", lambda device: 1000 * each + 1)
    items = explained(failing(torch.OutOfMemoryError("CUDA out of memory")), base)
    assert next(items) == 1
    with pytest.raises(UserError, match="memory ran out on cpu: .* room for some 1000 of them; lower --max-new-tokens"):
        next(items)


def test_other_errors_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        list(explained(failing(RuntimeError("shapes")), tiny_base("llama", tmp_path)))
    assert list(explained([1, 2], tiny_base("llama", tmp_path))) == [1, 2]
