"""The place of a batch script."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from allocations import Allocation
from ranks import wait_for


@pytest.fixture
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Allocation]:
    place = Allocation(tmp_path, **getattr(request, "param", {}))
    yield place
    place.end()

    wait_for(lambda: not place.reached, "the end of the supervisor")
