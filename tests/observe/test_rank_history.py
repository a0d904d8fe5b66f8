"""The map of ranks over time: from few lines, however many there are."""

import json
import random
from pathlib import Path

import pytest
from made import made_run

from hpcddp.observe.rank_history import COLUMNS, SAMPLES, TAIL, Heat
from hpcddp.rundir import RunDir


class Counted(Heat):
    """Counts the lines that are decoded."""

    taken = 0

    def _take(self, text: bytes) -> None:
        self.taken += 1
        super()._take(text)


def tell(run: RunDir, attempt: int, steps: range, slow: range = range(0)) -> None:
    """Four ranks, of which the third is slow for a while."""
    path = run.attempt(attempt).ranks
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        for step in steps:
            busy = [0.1, 0.1, 0.3 if step in slow else 0.1, 0.1 + random.random() / 1e9]
            f.write(json.dumps({"step": step, "busy_s": busy, "wait_s": [0.0] * 4}) + "\n")


def test_of_a_long_file_few_lines_are_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, range(1, 10_001))
    tell(run, 2, range(10_001, 20_001), slow=range(12_000, 15_000))
    heat = Counted(run)
    heat.update()
    assert heat.taken < SAMPLES + 4 * TAIL / 100 < 4000
    assert heat.newest.step == 20_000
    assert COLUMNS / 3 < len(heat.steps) <= COLUMNS and heat.steps == sorted(set(heat.steps))
    assert heat.steps[0] == 1 and heat.steps[-1] > 19_000
    gaps = [b - a for a, b in zip(heat.steps, heat.steps[1:], strict=False)]
    assert max(gaps) < 1000  # all of it is there
    slow = [step for step, ratio in zip(heat.steps, heat.rows()[2], strict=True) if ratio == 3.0]
    assert slow == [step for step in heat.steps if 12_000 <= step < 15_000] and len(slow) > 5
    before = heat.taken
    tell(run, 2, range(20_001, 20_004))
    heat.update()
    assert heat.newest.step == 20_003 and heat.taken == before + 3


def test_what_a_later_attempt_took_again_is_replaced(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, range(1, 101), slow=range(60, 101))
    tell(run, 2, range(51, 81))
    heat = Heat(run)
    heat.update()
    assert heat.steps == list(range(1, 81))
    assert 3.0 not in heat.rows()[2]


def test_what_there_is_no_time_for_comes_later(tmp_path: Path) -> None:
    heat = Heat(made_run(tmp_path))
    heat.update(0)
    assert heat.behind and heat.newest.step == 120  # some of it comes each time
    for _ in range(2):
        heat.update(0)
    assert not heat.behind and heat.newest.step == 400


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, range(1, 4))
    path = run.attempt(1).ranks
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    heat = Heat(run)
    heat.update()
    assert heat.steps == [1, 2]
    path.write_bytes(whole)
    heat.update()
    assert heat.steps == [1, 2, 3]


@pytest.mark.parametrize("word", [
        "", "x", "[1]", '{"step": "x"}', '{"step": 7, "busy_s": 3}', f'{{"step": {2**63}}}',
        f'{{"step": 7, "busy_s": [{"9" * 400}]}}', '{"step": 7, "gpu": ["x"]}', '{"step": -7}',
    ])  # fmt: skip
def test_lines_that_are_none(tmp_path: Path, word: str) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, range(1, 3))
    with run.attempt(1).ranks.open("a") as f:
        f.write(word + "\n")
    tell(run, 1, range(3, 5))
    heat = Heat(run)
    heat.update()
    assert heat.steps == [1, 2, 3, 4]
