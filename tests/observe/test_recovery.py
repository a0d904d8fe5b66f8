"""How a run continued in place: told by each view of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from local_runs import Command
from made import made_run
from sites import Site

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.observe import history, recovery
from hpcddp.rundir import STEP, RunDir, write_json

T0 = 1_800_000_000.0


def attempt(run: RunDir, number: int, events: list[dict[str, object]], **facts: object) -> Attempt:
    folder = run.attempt(number)
    folder.path.mkdir(exist_ok=True)
    made = replace(ledger.new_attempt("17", 1, slurm=True), number=number, **facts)  # type: ignore[arg-type]
    write_json(folder.facts, vars(made))
    folder.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    return made


def continued(run: RunDir, *, told: bool = True, action: str = decision.HERE) -> list[Attempt]:
    """Step 50 was the last one, and n3 takes the place of n2; step 51 is the first new one."""
    first = attempt(
        run, 1, [], nodes="n[1-2]", began=T0, ended=T0 + 101.5, cause="lost node", action=action
    )
    run.attempt(1).step.write_bytes(STEP.pack(50, T0 + 100))
    if told:
        write_json(run.attempt(1).failed, {"time": T0 + 100.2})
    events: list[dict[str, object]] = [
        {"event": "ranks", "time": T0 + 102.5, "ranks": []},
        {"event": "start", "time": T0 + 103.0, "step": 48},
        {"event": "train", "time": T0 + 103.3, "step": 49, "loss": 1.0},
        {"event": "train", "time": T0 + 103.9, "step": 51, "loss": 1.0},
    ]
    return [first, attempt(run, 2, events, nodes="n[1,3]", began=T0 + 102)]


def test_each_phase_has_its_seconds(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    mine = recovery.after(run, *continued(run))
    assert mine and {name: round(seconds, 1) for name, seconds in mine.seconds.items()} == {
        "detection": 0.2, "ending": 1.3, "starting": 1.0, "restoring": 0.5, "replaying": 0.9,
    }  # fmt: skip
    assert mine.replaced == {"n2": "n3"}
    assert str(mine) == (
        "in 3.9 s: detection 0.2, ending 1.3, starting 1.0, restoring 0.5, replaying 0.9; n3 for n2"
    )


def test_a_launcher_that_tells_no_moment_has_a_longer_end(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    mine = recovery.after(run, *continued(run, told=False))
    assert mine and "detection" not in mine.seconds
    assert round(mine.seconds["ending"], 1) == 1.5


def test_a_start_that_came_to_no_step_has_no_detection(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    attempts = continued(run)
    run.attempt(1).step.unlink()
    mine = recovery.after(run, *attempts)
    assert mine and "detection" not in mine.seconds
    assert round(mine.seconds["ending"], 1) == 1.3


def test_a_requeue_is_not_in_place_and_a_start_without_a_step_is_not_over(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    assert recovery.after(run, *continued(run, action=decision.AGAIN)) is None
    first, second = continued(run)
    lines = run.attempt(2).metrics.read_text().splitlines()
    run.attempt(2).metrics.write_text("\n".join(lines[:3]) + "\n")
    begun = recovery.after(run, first, second)
    assert begun and not begun.done
    assert str(begun) == "(detection 0.2, ending 1.3, starting 1.0, restoring 0.5; n3 for n2)"


def test_nothing_is_told_before_anything_is_known(tmp_path: Path) -> None:
    """As of a program that reports no steps, under a launcher that tells no moment."""
    run = made_run(tmp_path)
    first, second = continued(run, told=False)
    run.attempt(1).step.unlink()
    run.attempt(2).metrics.unlink()
    assert recovery.after(run, first, replace(second, nodes="n[1-2]")) is None
    assert str(recovery.after(run, first, second)) == "(n3 for n2)"


def test_a_step_that_an_attempt_before_has_taken_is_not_new(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    _, second = continued(run)
    again = replace(second, ended=T0 + 104, action=decision.HERE)
    run.attempt(2).step.write_bytes(STEP.pack(49, T0 + 103.3))
    events: list[dict[str, object]] = [
        {"event": "train", "time": T0 + 106, "step": 50, "loss": 1.0},
        {"event": "new", "time": T0 + 107, "step": 51},
    ]
    third = attempt(run, 3, events, nodes="n[1,3]", began=T0 + 105)
    mine = recovery.after(run, again, third)
    assert mine and round(sum(mine.seconds.values()), 1) == 3.7 and not mine.replaced


@pytest.mark.parametrize("words", [["why"], ["status"]])
def test_the_commands_tell_it(site: Site, hpcddp: Command, words: list[str]) -> None:
    run = made_run(site.runs, ends=((50, 50, "lost node"),))
    continued(run)
    shown = " ".join(hpcddp(*words, run.name).out.split())
    assert "in place in 3.9 s: detection 0.2, ending 1.3, starting 1.0" in shown
    assert "n3 for n2" in shown


def test_the_data_of_all_pages_have_it(tmp_path: Path) -> None:
    run = made_run(tmp_path, ends=((50, 50, "lost node"),))
    continued(run)
    first, second = history.summaries(run)
    assert first.to_dict()["recovered"].startswith("in 3.9 s: detection 0.2")
    assert second.to_dict()["recovered"] == ""


@pytest.mark.parametrize("text", ["{", '{"time": null}', '["x"]'])
def test_a_damaged_record_hides_nothing_else(site: Site, hpcddp: Command, text: str) -> None:
    run = made_run(site.runs, ends=((50, 50, "lost node"),))
    continued(run)
    run.attempt(1).failed.write_text(text)
    for words in (["why"], ["status"]):
        done = hpcddp(*words, run.name)
        assert run.name in done.out and "in place" not in done.out and "Error" not in done.err
