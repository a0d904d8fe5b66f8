"""A run as plain data: attempts and what they cost, curves, ranks, words."""

import json
import os
from pathlib import Path

import pytest
from made import STEP_S, made_run

from hpcddp.attempt import decision
from hpcddp.errors import RunError
from hpcddp.observe import curves
from hpcddp.observe.rank_history import COLUMNS
from hpcddp.observe.run_facts import static
from hpcddp.observe.viewer import Viewer
from hpcddp.report import shown
from hpcddp.rundir import RunDir, write_json
from hpcddp.submit import status


def tell(run: RunDir, *records: dict[str, object]) -> None:
    """What rank 0 writes at the end of the newest attempt."""
    with run.all_attempts()[-1].metrics.open("a") as f:
        f.writelines(json.dumps(record) + "\n" for record in records)


def test_a_run_with_two_preemptions(tmp_path: Path) -> None:
    view = Viewer(made_run(tmp_path)).look()
    assert view.status.state == "COMPLETED" and view.status.step == 400
    assert [attempt.summary.cause for attempt in view.attempts] == [
        "preempted",
        "preempted",
        "done",
    ]
    assert [attempt.summary.lost for attempt in view.attempts] == [0, 10, 0]
    assert [attempt.lost_s for attempt in view.attempts] == [0, 10 * STEP_S, 0]
    assert [attempt.waited_s for attempt in view.attempts] == [30, 45, 45]
    assert all(attempt.started_s == 10 for attempt in view.attempts)
    assert view.held_s == 3 * 10 + 410 * STEP_S
    assert view.useful_s == pytest.approx(400 * STEP_S)
    assert view.efficiency == pytest.approx(200 / 235)


@pytest.mark.parametrize("closed", [True, False])
def test_an_attempt_that_could_not_tell_its_end_held_no_more(tmp_path: Path, closed: bool) -> None:
    """Its node died: the next attempt closed it, a day later, or nothing came after it."""
    run = made_run(tmp_path, cause=None, last=300)
    whole = Viewer(made_run(tmp_path, "whole", last=300)).look().held_s
    number = 2 if closed else 3
    path = run.attempt(number).facts
    facts = json.loads(path.read_text()) | {"exit_code": None}
    if closed:
        facts |= {"action": decision.LEFT, "cause": "node failure", "ended": facts["ended"] + 86400}
    write_json(path, facts)
    state = status.known(run)
    state.state = "NODE_FAIL"
    assert Viewer(run).look(state).held_s == whole
    run.attempt(number).step.unlink()
    os.utime(run.attempt(number).log, (facts["began"] + 7, facts["began"] + 7))
    assert Viewer(run).look(state).attempts[number - 1].summary.ended == facts["began"] + 7
    if not closed:
        state.state = "RUNNING"
        assert Viewer(run).look(state).attempts[-1].summary.ended is None


def test_steps_that_no_checkpoint_has_are_of_no_use(tmp_path: Path) -> None:
    run = made_run(tmp_path, ends=(), cause="crash", last=300)
    path = run.attempt(1).facts
    write_json(path, json.loads(path.read_text()) | {"saved": 180})
    view = Viewer(run).look()
    assert view.lost_steps == 120 and view.useful_s == pytest.approx(180 * STEP_S)


def test_what_was_saved_is_as_the_ranks_told_it_where_the_folder_could_not_be_read(
    tmp_path: Path,
) -> None:
    run = made_run(tmp_path, ends=(), cause="crash", last=300)
    path = run.attempt(1).facts
    write_json(path, json.loads(path.read_text()) | {"saved": None})
    assert Viewer(run).look().lost_steps == 0
    lines = run.attempt(1).metrics.read_text().splitlines(keepends=True)
    run.attempt(1).metrics.write_text("".join(x for x in lines if '"checkpoint"' not in x))
    assert Viewer(run).look().lost_steps == 300


def test_no_efficiency_where_no_step_told_its_time(tmp_path: Path) -> None:
    run = made_run(tmp_path, ends=(), last=300)
    metrics = run.attempt(1).metrics
    metrics.write_text(metrics.read_text().replace('"step_s"', '"other"'))
    assert Viewer(run).look().efficiency is None


def test_an_attempt_that_another_one_followed_is_read_once(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    viewer = Viewer(run)
    before = viewer.look()
    for old in (run.attempt(1), run.attempt(2)):
        with old.metrics.open("a") as f:
            f.write('{"event": "train", "step": 301, "loss": 7.0}\n')
        with old.ranks.open("a") as f:
            f.write('{"step": 301, "busy_s": [1, 1, 1, 1], "wait_s": [0, 0, 0, 0]}\n')
        old.facts.write_text("{")
    after = viewer.look()
    after.now = before.now
    after.held_s, after.useful_s = before.held_s, before.useful_s  # the last one works
    assert after == before


def test_what_the_interruptions_cost(tmp_path: Path) -> None:
    view = Viewer(made_run(tmp_path)).look()
    assert view.interruptions == 2 and view.lost_steps == 10
    assert view.started_s == 30 and view.lost_s == 10 * STEP_S
    assert view.interrupted_s == 2 * (45 + 10) + 10 * STEP_S


def test_figures_are_of_all_points_however_few_are_drawn(tmp_path: Path) -> None:
    run = made_run(tmp_path, slow=None)
    view = Viewer(run, 50).look()
    assert view.newest["loss"] == view.curves["loss"][1][-1] and view.curves["loss"][0][-1] == 400
    assert view.medians == {"step_s": STEP_S, "samples_per_s": 64.0}
    assert len(view.means["loss"][0]) == 50 and "eval/loss" not in view.means
    assert Viewer(run).look().means == {}


def test_a_run_that_works_tells_when_it_will_be_done(tmp_path: Path) -> None:
    view = Viewer(made_run(tmp_path, cause=None, last=300)).look()
    assert view.status.state == "RUNNING"
    assert view.step_s == pytest.approx(STEP_S)
    assert view.to_go_s == pytest.approx(100 * STEP_S)


def test_the_slow_rank_is_marked(tmp_path: Path) -> None:
    view = Viewer(made_run(tmp_path, cause=None, last=300)).look()
    assert [rank.state for rank in view.ranks] == ["", "", "slow", ""]
    assert [rank.host for rank in view.ranks] == ["n1", "n1", "n2", "n2"]
    assert view.ranks[2].busy_s == 0.4
    assert len(view.heat) == 4 and len(view.heat_steps) <= COLUMNS
    assert view.heat_steps == sorted(set(view.heat_steps))
    late = [i for i, step in enumerate(view.heat_steps) if step > 210]
    assert late and all(view.heat[2][i] > 1.5 > view.heat[1][i] for i in late)


def test_the_rank_that_ended_an_attempt_is_dead(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause="crashed", last=300)
    write_json(run.attempt(3).error, {"rank": 1, "host": "n1", "type": "X", "message": "no <b>"})
    view = Viewer(run).look()
    assert [rank.state for rank in view.ranks] == ["", "dead", "slow", ""]
    assert view.ranks[1].note == "no <b>"


@pytest.mark.parametrize(
    ("log", "dead", "note"),
    [
        ("hpcddp: rank 3 on n2 was ended by SIGKILL\n", [3], "was killed: out of memory?"),
        ("srun: error: n2: task 3: Killed\n", [3], "was killed: out of memory?"),
        ("srun: error: Node failure on n2\n", [2, 3], "failed"),
        ("", [], ""),
    ],
)
@pytest.mark.parametrize("cause", [None, "crash"])
def test_a_rank_that_lost_another_one_is_not_dead(
    tmp_path: Path, log: str, dead: list[int], note: str, cause: str | None
) -> None:
    run = made_run(tmp_path, cause=cause, last=300, slow=None)
    gone = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"
    error = {"rank": 0, "host": "n1", "type": "RuntimeError", "kind": "peer", "message": gone}
    write_json(run.attempt(3).error, error)
    run.attempt(3).log.write_text(f"0: RuntimeError: {gone}\n{log}")
    view = Viewer(run).look()
    assert [rank.rank for rank in view.ranks if rank.state == "dead"] == dead
    assert {rank.note for rank in view.ranks if rank.state} == ({note} if dead else set())
    named = shown([view.to_dict() | static(run)])["runs"][0]["attempts"][-1]["error"]
    assert named["text"].endswith(note) and (not log or "Connection" not in named["text"])
    assert named["rank"] == (3 if dead == [3] else None if dead else 0)


def test_a_rank_is_slow_until_it_is_well_in_all(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300, slow=None)
    viewer = Viewer(run)
    record = {"step": 300, "host": "n2", "own_s": 1.0, "median_s": 0.5, "ratio": 2.0, "since": 298}
    for event, what, state in (
        ("slow", "compute", "slow"), ("slow", "data", "slow"), ("recovered", "data", "slow"),
        ("recovered", "compute", ""),
    ):  # fmt: skip
        tell(run, {"event": event, "rank": 2, "what": what, **record})
        view = viewer.look()
        assert [rank.state for rank in view.ranks] == ["", "", state, ""]
    assert view.ranks[2].note == ""


def test_what_still_holds_is_not_forgotten_over_what_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "KEPT", 20)
    run = made_run(tmp_path, cause=None, last=300)
    tell(run, *({"event": "log", "step": 300, "metrics": {"a": i}} for i in range(100)))
    viewer = Viewer(run)
    view = viewer.look()
    assert [rank.state for rank in view.ranks] == ["", "", "slow", ""]
    assert view.steps_per_epoch == 100 and view.started_s == 30
    assert len(viewer.curves.events) <= 40


def test_ranks_go_by_their_number(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    place = {"local": 0, "device": "cpu"}
    rows = [{"rank": r, "node": r // 2, "host": f"n{r}", **place} for r in (3, 2, 0)]
    tell(run, {"event": "ranks", "ranks": rows}, {"event": "slow", "rank": 0, "what": "data"})
    write_json(run.attempt(3).error, {"rank": -1, "message": "who?"})
    view = Viewer(run).look()
    assert [(rank.rank, rank.host, rank.state) for rank in view.ranks] == [
        (3, "n3", ""), (2, "n2", ""), (0, "n0", "slow"),
    ]  # fmt: skip
    assert [rank.busy_s for rank in view.ranks] == [0.2 + 0.015, 0.4, 0.2]
    write_json(run.attempt(3).error, {"rank": 2, "message": "I"})
    assert [rank.state for rank in Viewer(run).look().ranks] == ["", "dead", "slow"]


def test_a_folder_of_another_form_is_an_error_in_words(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause=None, last=300)
    path = run.attempt(3).facts
    write_json(path, json.loads(path.read_text()) | {"began": "x", "ended": []})
    with pytest.raises(RunError, match="cannot read the records of this run"):
        Viewer(run).look()


def test_it_is_plain_data(tmp_path: Path) -> None:
    run = made_run(tmp_path)
    data = json.loads(json.dumps(Viewer(run).look().to_dict() | static(run)))
    assert data["attempts"][1]["cause"] == "preempted" and data["attempts"][1]["lost_s"] == 5.0
    assert data["ranks"][0]["state"] == "" and data["ranks"][2]["host"] == "n2"
    assert data["config"]["global_batch"] == 32 and "srun" in data["script"]
    assert len(data["curves"]["loss"][0]) <= 400
