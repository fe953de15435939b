"""Fixtures that several test files share."""

import os
import platform
from pathlib import Path

import pytest

from mtp import kernels as kernels_module
from mtp.base import FrozenBase
from mtp.embedded import default_home
from mtp.kernels import MOST_ROWS, Kernels, build

# Vectors of sixteen, eight and four numbers, as far as this machine has them, and code as for processors on which
# compilers avoid chains of fused sums.
PROCESSORS = (
    ["native", "x86-64-v3", "x86-64-v3 -mtune=znver3", "x86-64"] if platform.machine() == "x86_64" else ["native"]
)


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


@pytest.fixture(scope="session", params=PROCESSORS)
def any_kernels(request: pytest.FixtureRequest, kernels: Kernels, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """The same, as they are on processors with shorter vectors too."""
    if request.param == "native":
        return kernels
    with pytest.MonkeyPatch.context() as patch:
        flags = [part for flag in kernels_module._FLAGS for part in flag.replace("native", request.param).split()]
        patch.setattr(kernels_module, "_FLAGS", flags)
        return Kernels(build(tmp_path_factory.mktemp("kernels")), kernels.rows)
