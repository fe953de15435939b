"""How much memory a device has left, and whether an error says that there was none.

Knows: machines, containers and CUDA devices. Refuses to know: what the memory is wanted for.
"""

import os
from pathlib import Path

import torch

_WORDS = ("can't allocate memory", "not enough memory", "out of memory")  # of torch's allocators


def out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _WORDS)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, or None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    known = [_available(Path("/proc/meminfo")), _group_limit(Path("/sys/fs/cgroup"))]
    return min((value for value in known if value is not None), default=_physical())


def _available(path: Path) -> int | None:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _group_limit(folder: Path) -> int | None:
    """What a control group (a container) has left."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return None if limit == "max" else int(limit) - used + int(parts["inactive_file"])  # a cache, given back
    except (OSError, KeyError, ValueError):
        return None


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
