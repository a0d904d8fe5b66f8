"""Curves over all attempts: each step once, whatever was taken again."""

import json
from pathlib import Path

from made import made_run

from hpcddp.observe.curves import Curves
from hpcddp.rundir import RunDir


def tell(run: RunDir, attempt: int, *records: dict[str, object], end: str = "\n") -> None:
    path = run.attempt(attempt).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as f:
        f.write("\n".join(map(json.dumps, records)) + end)


def point(step: int, loss: float) -> dict[str, object]:
    return {"event": "train", "step": step, "time": 1.0 * step, "loss": loss}


def losses(curves: Curves) -> dict[int, float]:
    series = curves.of("loss")
    return dict(zip(series.steps, series.values, strict=True))


def test_steps_that_a_later_attempt_took_again_count_once(tmp_path: Path) -> None:
    run = made_run(tmp_path)  # the second attempt came to step 260 and had saved step 250
    curves = Curves(run)
    assert curves.update()
    assert curves.of("loss").steps.tolist() == list(range(1, 401))
    assert curves.of("eval/accuracy").steps.tolist() == [100, 200, 300, 400]
    assert not curves.update()


def test_what_is_new_is_read_as_it_comes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    curves = Curves(run)
    tell(run, 1, {"event": "start", "step": 0}, point(1, 3.0))
    assert curves.update() and losses(curves) == {1: 3.0}
    tell(run, 1, point(2, 2.0), point(3, 1.0))
    tell(run, 2, {"event": "start", "step": 1}, point(2, 5.0))
    assert curves.update() and losses(curves) == {1: 3.0, 2: 5.0}
    assert curves.step == 2


def test_a_rollback_drops_what_it_takes_back(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, *(point(s, 1.0) for s in (1, 2, 3)), {"event": "rollback", "step": 3, "to": 1},
         point(2, 9.0))  # fmt: skip
    curves = Curves(run)
    curves.update()
    assert losses(curves) == {1: 1.0, 2: 9.0}


def test_a_line_that_is_cut_is_passed_over_and_one_that_grows_is_waited_for(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, point(1, 1.0))
    tell(run, 1, end='{"event": "tra\n')  # a crash, and the next attempt's pen behind it
    tell(run, 1, point(2, 2.0), end="")
    curves = Curves(run)
    curves.update()
    assert losses(curves) == {1: 1.0}
    tell(run, 1, end="\n")
    curves.update()
    assert losses(curves) == {1: 1.0, 2: 2.0}


def test_numbers_that_are_none_are_points_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, point(1, 1.0), point(2, float("nan")), point(3, float("inf")))
    tell(run, 1, {"event": "train", "step": "four"}, point(5, 5.0))
    curves = Curves(run)
    curves.update()
    values = losses(curves)
    assert list(values) == [1, 2, 3, 5]
    assert values[2] != values[2] and values[3] == float("inf")


def test_steps_that_tell_no_loss_count_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    mute = [{"event": "step", "step": n, "time": 1.0 * n, "step_s": 0.5} for n in (5, 15, 20)]
    tell(
        run, 1, {"event": "start", "step": 0}, mute[0], point(10, 3.0) | {"step_s": 1.0}, *mute[1:]
    )
    tell(run, 1, {"event": "step", "step": 25})  # by an hpcddp that told no more of it
    curves = Curves(run)
    curves.update()
    assert losses(curves) == {10: 3.0}
    assert curves.of("step_s").steps.tolist() == [5, 10, 15, 20]
    assert curves.spent.before(20) == 2.5 + 5.0 + 2.5 + 2.5 and curves.step == 25


def paced(step: int, seconds: float) -> dict[str, object]:
    return point(step, 1.0) | {"step_s": seconds}


def test_a_record_tells_the_seconds_of_all_steps_since_the_one_before(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    tell(run, 1, {"event": "start", "step": 0}, paced(1, 6.0), paced(5, 0.5))
    tell(run, 1, {"event": "eval", "step": 7, "metrics": {}}, paced(10, 1.0))
    curves = Curves(run)
    curves.update()
    assert curves.spent.values.tolist() == [6.0, 8.0, 13.0]
    assert [curves.spent.before(step) for step in (0, 1, 9, 12)] == [0.0, 6.0, 8.0, 13.0]
    tell(run, 2, {"event": "start", "step": 7}, paced(8, 4.0), paced(10, 1.0))
    curves.update()
    assert curves.spent.steps.tolist() == [1, 5, 8, 10]
    assert curves.spent.values.tolist() == [6.0, 8.0, 12.0, 14.0]  # of step 7 nobody tells now
