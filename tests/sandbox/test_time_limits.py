"""The time limit that a rehearsal gives one attempt of its job."""

from pathlib import Path

import pytest

from hpcddp.attempt import ledger
from hpcddp.sandbox import time_limits


@pytest.mark.parametrize(
    ("left", "end"), [(None, 0.0), (time_limits.USUAL_SECONDS, 0.0), (60.0, 1060.0)]
)
def test_only_a_limit_of_its_own_has_a_deadline(left: float | None, end: float) -> None:
    facts = ledger.new_attempt("1", 1)
    facts.began = 1000.0
    facts.deadline = None if left is None else facts.began + left
    assert time_limits.deadline(facts) == end


def test_the_prolog_finds_the_limit(tmp_path: Path) -> None:
    time_limits.limit_next(tmp_path, 61.7)
    assert [path.name for path in tmp_path.iterdir()] == [time_limits.FILE]
    assert (tmp_path / time_limits.FILE).read_text() == "62"
    assert f"{{folder}}/{time_limits.FILE} " in time_limits.PROLOG
