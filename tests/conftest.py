"""Fixtures that several test files share."""

import os

import pytest

from mtp.base import FrozenBase
from mtp.embedded import default_home


@pytest.fixture(scope="session")
def smollm2() -> FrozenBase:
    """The embedded base in float32 on the CPU; the first run ever fetches and converts it, which takes a minute."""
    return FrozenBase.from_pretrained("smollm2-135m", device="cpu", home=default_home(os.environ))
