"""Times with their zone, for people and for programs."""

import time
from collections.abc import Iterator

import pytest

from hpcddp.submit import times

MOMENT = 1_790_000_000  # 2026-09-21, in summer


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "person", "program"),
    [
        ("UTC", "2026-09-21 14:13:20 UTC", "2026-09-21T14:13:20+00:00"),
        ("Europe/Berlin", "2026-09-21 16:13:20 CEST", "2026-09-21T16:13:20+02:00"),
        ("EST5", "2026-09-21 09:13:20 EST", "2026-09-21T09:13:20-05:00"),
    ],
    indirect=["zone"],
)
def test_every_time_has_its_zone(zone: None, person: str, program: str) -> None:
    assert times.shown(MOMENT) == times.shown(program) == person
    assert times.shown(program[:19]) == person  # of an older version: local, without an offset
    assert times.iso(MOMENT + 0.75) == program and times.seconds(program) == MOMENT
    assert times.shown("") == "" and times.shown("in an hour") == "in an hour"
