"""What a machine or a container has left, and errors that say there is nothing."""

from pathlib import Path

import pytest
import torch

from mtp.memory import _available, _group_limit, free_memory, out_of_memory

CPU = torch.device("cpu")


def test_free_memory_is_the_least_of_machine_and_container(tmp_path: Path) -> None:
    free = free_memory(CPU)
    assert free is None or 10**6 < free < 10**15
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable:     700 kB\n")
    assert _available(tmp_path / "meminfo") == 700 * 1024
    assert _available(tmp_path / "none") is None
    assert _group_limit(tmp_path) is None
    for name, text in (("memory.max", "1000\n"), ("memory.current", "900\n"), ("memory.stat", "inactive_file 300\n")):
        (tmp_path / name).write_text(text)
    assert _group_limit(tmp_path) == 400, "what a container keeps of files is given back when it is needed"
    (tmp_path / "memory.max").write_text("max\n")
    assert _group_limit(tmp_path) is None


def test_an_allocation_that_fails_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert out_of_memory(caught.value)
    assert out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("shapes cannot be multiplied"))
