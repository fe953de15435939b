"""What tests of training share: processes of one run that cost no imports."""

from collections.abc import Iterator

import pytest

from tests.train.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    server = Ranks()
    yield server
    server.close()
