"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.kernels import MOST_ROWS, Kernels, build


@pytest.fixture(scope="session")
def smollm2() -> FrozenBase:
    """The embedded base in float32 on the CPU; the first run ever fetches and converts it, which takes a minute."""
    return FrozenBase.from_pretrained("smollm2-135m", device="cpu", home=default_home(os.environ))


@pytest.fixture(scope="session")
def compiled_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with compiled kernels and nothing else."""
    home = tmp_path_factory.mktemp("home")
    build(home / "kernels")
    return home


@pytest.fixture(scope="session")
def kernels(compiled_home: Path) -> Kernels:
    """Kernels that are used for every number of rows they can."""
    return Kernels(build(compiled_home / "kernels"), frozenset(range(1, MOST_ROWS + 1)))
