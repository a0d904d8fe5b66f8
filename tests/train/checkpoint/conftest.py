"""What the tests of saves at a failure share."""

from collections.abc import Iterator

import pytest
from places import Place


@pytest.fixture
def places() -> Iterator[list[Place]]:
    made: list[Place] = []
    yield made
    for place in made:
        place.script.kill()
        place.script.wait()
        for port in place.ports:
            port.close()
