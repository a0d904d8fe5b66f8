"""What is known about the end of an attempt, and what its exit code means with that."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from sites import Site, record_run

from hpcddp import record
from hpcddp.attempt import decision, exit_codes, ledger
from hpcddp.attempt.end_facts import gather
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import STEP, RunDir, read_json, write_json


@pytest.fixture
def run(site: Site) -> RunDir:
    made = RunDir(site.runs / "toy-1")
    made.create()
    return record_run(made, backend="local")


def begun(run: RunDir) -> None:
    assert ledger.begin(run, ledger.new_attempt("6", 1), lambda earlier: False)


def code_of(run: RunDir, mine: Attempt, code: int) -> int:
    return decision.code_of(gather(run, mine, record.read(run), code))


@pytest.mark.parametrize(
    ("left", "lead", "by", "late"),
    [
        (60.0, 0, "", True),
        (300.0, 0, "", False),
        (300.0, 0, "SIGUSR2", False),
        (300.0, 0, "time limit", True),  # a save of two minutes: the ranks began in time
        (300.0, 250, "SIGUSR2", True),
    ],
)
def test_a_stop_before_the_time_limit_is_known(
    site: Site, run: RunDir, left: float, lead: int, by: str, late: bool
) -> None:
    site.program("scontrol", "echo JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None")
    job = record.read(run)
    job.lead = lead
    record.write(run, job)
    mine = ledger.new_attempt("7", 1, slurm=True)
    mine.number, mine.deadline = 1, time.time() + left
    run.attempt(1).path.mkdir()
    run.attempt(1).metrics.write_text(f'{{"event": "end", "by": "{by}"}}\n')
    assert gather(run, mine, record.read(run), 85).late is late


@pytest.mark.parametrize(
    ("code", "want", "events", "found"),
    [
        (3, "", [], 3),
        (exit_codes.STOPPED, "", [], exit_codes.FAILED),  # by chance
        (3, "preempt", [], 143),
        (0, "cancel", [], 143),
        (0, "stop", [], 143),  # it may have more to do
        (0, "stop", [{"event": "end", "outcome": "done"}], 0),
        (
            0,
            "stop",
            [{"event": "end", "outcome": "done"}, {"event": "end", "outcome": "stopped"}],
            143,
        ),
        (0, "", [], 0),
    ],
)
def test_what_the_exit_code_of_a_program_means(
    run: RunDir, code: int, want: str, events: list[dict[str, str]], found: int
) -> None:
    record_run(run, backend="local", spec={"command": ["python", "train.py"]})
    begun(run)
    if want:
        write_json(run.request, {"want": want})
    run.attempt(1).metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    mine = ledger.last(run)
    assert mine and code_of(run, mine, code) == found


def test_a_loop_that_saved_and_left_is_not_done_whatever_it_said_before(run: RunDir) -> None:
    record_run(run, backend="local", spec={"command": ["python", "train.py"]})
    begun(run)
    run.attempt(1).metrics.write_text('{"event": "end", "outcome": "done"}\n')
    write_json(run.attempt(1).left, {"code": exit_codes.STOPPED, "step": 3})
    mine = ledger.last(run)
    assert mine and code_of(run, mine, 0) == exit_codes.STOPPED


@pytest.mark.parametrize(
    ("lead", "left", "found"), [(120, 60.0, 143), (120, 200.0, 0), (0, 60.0, 0)]
)
def test_a_program_that_was_warned_of_its_time_limit_may_have_more_to_do(
    site: Site, run: RunDir, lead: int, left: float, found: int
) -> None:
    site.program("scontrol", "echo JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None")
    record_run(run, spec={"command": ["python", "train.py"]}, lead=lead)
    mine = ledger.new_attempt("7", 1, slurm=True)
    mine.number, mine.deadline = 1, time.time() + left
    run.attempt(1).path.mkdir()
    assert code_of(run, mine, 0) == found


def test_a_program_is_done_though_a_term_came_for_its_script_alone(
    site: Site, run: RunDir, tmp_path: Path
) -> None:
    """Slurm's words are those of scancel; the job runs."""
    site.program("scontrol", "echo JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None")
    record_run(run, spec={"command": ["python", "train.py"]})
    mine = ledger.new_attempt("7", 1, slurm=True)
    mine.number, mine.said = 1, str(tmp_path / "said")
    Path(mine.said).write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2030-01-01 ***\n")
    run.attempt(1).path.mkdir()
    assert code_of(run, mine, 0) == 0
    site.program("scontrol", "echo JobId=7 JobState=COMPLETING Restarts=0 PreemptTime=None")
    assert code_of(run, mine, 0) == 0  # these words count for nothing any more
    with Path(mine.said).open("a") as f:
        f.write("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2030-01-02 ***\n")
    assert code_of(run, mine, 0) == 143


def stays(
    run: RunDir,
    launcher: str = "srun",
    left: float | None = None,
    took: float = 5,
    site: dict[str, Any] | None = None,
    spares: int = 0,
    **policy: Any,
) -> bool:
    """Whether attempt 20, whose first step came `took` seconds after its start, can restart in
    place `left` seconds before its time limit."""
    job = record.read(run)
    job.launcher = launcher
    job.spec["requeue"], job.spec["spares"] = {"here": True, **policy}, spares
    mine = ledger.new_attempt("7", 1, slurm=True)
    mine.number, mine.began, mine.site = 20, time.time() - took - 1, site or {}
    mine.deadline = None if left is None else time.time() + left
    mine.checkpoint, mine.nodes = 0, "n[1-2]"
    folder = run.attempt(20)
    folder.path.mkdir(exist_ok=True)
    write_json(folder.facts, asdict(mine))
    if not folder.metrics.exists():
        folder.metrics.write_text(json.dumps({"event": "train", "time": mine.began + took}) + "\n")
    return gather(run, mine, job, 1).here


def restarted(run: RunDir, number: int, ago: float) -> None:
    """An earlier attempt that was followed in place, so many seconds ago."""
    mine = ledger.new_attempt("7", 1, slurm=True)
    mine.number, mine.cause, mine.action = number, decision.CRASH, decision.HERE
    mine.nodes = "n[1-2]"
    mine.ended = time.time() - ago
    run.attempt(number).path.mkdir()
    write_json(run.attempt(number).facts, asdict(mine))


@pytest.fixture
def runs_on(site: Site) -> None:
    site.program("scontrol", "echo JobId=7 JobState=RUNNING Restarts=0 PreemptTime=None")


@pytest.mark.usefixtures("runs_on")
def test_a_restart_in_place_needs_a_launcher_that_can(run: RunDir) -> None:
    assert stays(run) and stays(run, "fork") and stays(run, "torchrun")
    assert not (stays(run, "mpi") or stays(run, "horovod") or stays(run, "dask"))
    assert not stays(run, here=False)


@pytest.mark.usefixtures("runs_on")
@pytest.mark.parametrize(
    ("steps", "left", "took", "there"),
    [
        (True, 200, 5, True),
        (True, 80, 5, False),
        (True, 200, 150, False),  # its first step would come too late
        (False, 1000, 7200, True),  # no step was recorded: the start may have been short
        (False, 600, 7200, False),
    ],
)
def test_a_restart_in_place_needs_time(
    run: RunDir, steps: bool, left: float, took: float, there: bool
) -> None:
    run.attempt(20).path.mkdir()
    if not steps:
        run.attempt(20).metrics.touch()
    assert stays(run, left=left, took=took) is there


@pytest.mark.usefixtures("runs_on")
def test_after_ten_restarts_in_place_within_an_hour_the_job_is_requeued(run: RunDir) -> None:
    for number in range(1, 10):
        restarted(run, number, 600)
    restarted(run, 10, 4000)
    assert stays(run)
    restarted(run, 11, 10)
    assert not stays(run)


@pytest.mark.usefixtures("runs_on")
def test_a_restart_in_place_that_brought_nothing_is_not_repeated(run: RunDir) -> None:
    """The node may be why."""
    restarted(run, 19, 10)
    assert not stays(run)
    saved = run.checkpoints / "step-10"
    saved.mkdir(parents=True)
    (saved / "COMPLETE").write_text('{"attempt": 20}')
    assert stays(run)


@pytest.mark.usefixtures("runs_on")
def test_a_restart_in_place_that_brought_nothing_is_repeated_on_other_nodes(run: RunDir) -> None:
    """A node is lost in it, or a spare takes the place of the one whose rank has failed."""
    restarted(run, 19, 10)
    run.attempt(19).step.write_bytes(STEP.pack(5, time.time()))
    run.attempt(20).path.mkdir()
    write_json(run.attempt(20).failed, {"usable": ["n1", "n2"]})
    assert not stays(run, "fork", spares=1)
    write_json(run.attempt(20).failed, {"usable": ["n1", "n3"]})
    assert stays(run, "fork", spares=1)
    write_json(run.attempt(20).failed, {"usable": ["n1", "n2", "n3"]})
    assert not stays(run, "fork", spares=1)
    write_json(run.attempt(20).error, {"kind": "crash", "host": "n2", "rank": 1})
    assert stays(run, "fork", spares=1) and not stays(run)


@pytest.mark.usefixtures("runs_on")
def test_a_step_is_enough_for_another_restart_in_place(run: RunDir) -> None:
    restarted(run, 19, 10)
    assert not stays(run)
    run.attempt(20).step.write_bytes(STEP.pack(1, time.time()))
    assert stays(run)


@pytest.mark.usefixtures("runs_on")
def test_a_node_that_failed_is_left(run: RunDir) -> None:
    """By the ranks' own comparison, or as it came to no step, or wherever the job is to avoid the
    nodes of failures. A spare takes its place."""
    run.attempt(20).path.mkdir()
    failure = {"kind": "crash", "host": "n2", "rank": 1}
    write_json(run.attempt(20).error, failure)
    assert not stays(run) and stays(run, "fork", spares=1) and not stays(run, spares=1)
    run.attempt(20).step.write_bytes(STEP.pack(5, time.time()))
    assert stays(run) and not stays(run, exclude_bad_nodes=True)
    assert stays(run, "fork", spares=1, exclude_bad_nodes=True)
    write_json(run.attempt(20).error, failure | {"bad_host": True})
    assert not stays(run) and stays(run, "fork", spares=1)


@pytest.mark.usefixtures("runs_on")
def test_a_node_is_left_at_the_second_failure_within_a_thousand_steps(run: RunDir) -> None:
    failure = {"kind": "crash", "host": "n2", "rank": 1}
    restarted(run, 19, 10)
    for number in (19, 20):
        run.attempt(number).path.mkdir(exist_ok=True)
        write_json(run.attempt(number).error, failure)
    run.attempt(19).step.write_bytes(STEP.pack(100, time.time()))
    run.attempt(20).step.write_bytes(STEP.pack(1000, time.time()))
    assert not stays(run) and stays(run, "fork", spares=1)
    run.attempt(20).step.write_bytes(STEP.pack(1100, time.time()))
    assert stays(run)


@pytest.mark.parametrize(("grace", "waits"), [(0, False), (30, True)])
def test_a_restart_in_place_does_not_wait_for_slurm(
    site: Site, run: RunDir, grace: int, waits: bool
) -> None:
    """But where the job may have been preempted, and has a grace time."""
    site.program("scontrol", "sleep 4; echo JobState=RUNNING Restarts=0 PreemptTime=2026-11-26")
    job = record.read(run)
    mine = ledger.new_attempt("7", 1, slurm=True)
    mine.number, mine.site, mine.deadline = 1, {"grace": grace}, time.time() + 1000
    job.launcher, job.spec["requeue"] = "srun", {"here": True}
    run.attempt(1).path.mkdir()
    end = gather(run, mine, job, 1)
    assert (end.here, end.preempted) == (True, waits)
    action = decision.AGAIN if waits else decision.HERE
    assert decision.decide(end, [], decision.Policy()).action == action


@pytest.mark.usefixtures("runs_on")
@pytest.mark.parametrize(("took", "there"), [(5, False), (7200, True)])
def test_a_program_that_reports_no_steps_has_come_on_if_it_ran_for_long(
    run: RunDir, took: float, there: bool
) -> None:
    write_json(run.job, {**(read_json(run.job) or {}), "spec": {"command": ["./train.sh"]}})
    restarted(run, 19, 10)
    run.attempt(20).path.mkdir()
    run.attempt(20).metrics.touch()
    assert stays(run, took=took) is there
