"""What a job lives through on the real Slurm: it comes back by itself, or it stays ended."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hpcddp.attempt import ledger
from hpcddp.observe import history
from hpcddp.rundir import RunDir, read_lines, read_step

from .desk import LONG, Desk, pids, standing_still, wait_for

STEPS = 250
# About 50 steps a second, so that a stop falls between many of them.
STEADY = ("--set", f"max_steps={STEPS}", "--set", "dataset.pause=0.005", "--gpus", "2")
SIZE = (*STEADY[:-1], "1", "--nodes", "2")


def lost(run: RunDir) -> int:
    """Optimizer steps that were taken more than once, by the ranks' own notes."""
    return sum(row.lost for row in history.summaries(run))


def resumed(run: RunDir, attempt: int) -> int:
    """The step after which an attempt went on."""
    lines = read_lines(run.attempt(attempt).metrics)
    return int(next(line["step"] for line in lines if line["event"] == "start"))


def finished(desk: Desk, run: str) -> RunDir:
    """Wait for the end of a run that comes back by itself; it must be complete."""
    ended = desk.until(lambda s: s["state"] in ("COMPLETED", "FAILED", "CANCELLED", "LOST"), run)
    assert (ended["state"], ended["step"]) == ("COMPLETED", STEPS), desk("why", run)
    return desk.run(run)


@pytest.mark.smoke("preemption", quick=True)
def test_a_preempted_job_comes_back_and_loses_nothing(desk: Desk) -> None:
    run = desk.submit(*SIZE)
    job = desk.training(run, step=30)["job_id"]
    desk.take_all_nodes()
    again = desk.training(run, attempt=2)
    assert again["job_id"] == job
    folder = finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, first.exit_code) == ("preempted", "requeue", 85)
    assert (second.cause, lost(folder)) == ("done", 0)
    assert resumed(folder, 2) == first.saved > 30
    row = json.loads(desk("why", run, "--json"))["attempts"][0]
    assert row["by"] == "SIGTERM" and row["safe_s"] < 5
    assert "preempted" in desk("why", run)


def test_a_requeued_job_does_not_wait(desk: Desk) -> None:
    """Slurm holds a requeued job for two minutes; the nodes are free at once.

    What the ranks' own start takes is a matter of the benchmarks.
    """
    run = desk.submit(*LONG, *SIZE[4:], "--set", "train.log_every=1")
    desk.training(run, step=30)
    desk("preempt", run)
    desk.training(run, attempt=2)
    before, after = desk.attempts(run)
    assert before.cause == "preempted" and before.ended
    assert after.began - before.ended <= 10
    (*_, last), (first, *_) = (steps(desk.run(run), attempt) for attempt in (1, 2))
    assert first["step"] == last["step"] + 1
    desk("cancel", run)
    desk.until(lambda s: s["state"] == "CANCELLED", run)


def steps(run: RunDir, attempt: int) -> list[dict[str, Any]]:
    """What was noted of an attempt's steps."""
    return [x for x in read_lines(run.attempt(attempt).metrics) if x["event"] == "train"]


def test_an_exception_is_tried_three_times_without_progress(desk: Desk) -> None:
    """A preemption between them is not one of them."""
    bad = """
import os
n, good, plain = 0, loss, model
def loss(output, target):
    global n
    n += 1
    if n == 20: raise ValueError('always at 20')
    return good(output, target)
def model():
    if os.environ["HPCDDP_ATTEMPT"] == "2": time.sleep(4)
    return plain()
"""
    task = desk.folder / "jobs/toy.py"
    task.write_text(task.read_text() + bad)
    run = desk.submit("--set", f"max_steps={STEPS}", "--gpus", "2", "--set", "checkpoint.every=0")
    desk.until(lambda s: s["attempt"] == 2 and s["state"] == "RUNNING", run)
    desk("preempt", run)
    ended = desk.until(lambda s: s["state"] == "FAILED", run)
    attempts = desk.attempts(run)
    assert attempts[1].cause == "preempted" and not attempts[0].progress
    counted = attempts[2:] if attempts[1].progress else attempts  # it may have taken a step
    assert [a.cause for a in counted if a.cause != "preempted"] == ["crash"] * 3
    assert "ValueError: always at 20" in ended["reason"]
    assert "3 times without progress" in ended["reason"]
    told = desk("why", run)
    assert "raise ValueError('always at 20')" in told and told.count("Traceback") == 1


@pytest.mark.smoke("crash")
def test_a_killed_rank_comes_back(desk: Desk) -> None:
    run = desk.submit(*STEADY, "--set", "checkpoint.every=20")
    folder = Path(desk.training(run, step=30)["path"])
    wait_for(lambda: killed(RunDir(folder)))
    done = finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("crash", "here", "done")
    assert lost(done) == 0  # the other rank has saved the step


def killed(run: RunDir) -> bool:
    """Kill a rank, at a step that is not saved yet."""
    with standing_still(ranks := pids(run)):
        if read_step(run.attempt(1))[0] <= ledger.newest_step(run):
            return False
        os.kill(ranks[1], signal.SIGKILL)
        return True


@pytest.mark.parametrize(
    "when",
    ["pending", pytest.param("step", marks=pytest.mark.smoke("cancellation", quick=True))],
)
def test_what_a_person_cancels_stays_so(desk: Desk, when: str) -> None:
    run = desk.submit(*SIZE, *(["--sbatch", "hold=true"] if when == "pending" else []))
    job = desk.until(lambda s: bool(s["job_id"]), run)["job_id"]
    if when == "step":
        desk.training(run, step=10)
    desk.slurm.run("scancel", job, check=True)
    desk.until(lambda s: s["state"] == "CANCELLED", run)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        assert desk.status(run)["state"] == "CANCELLED"
        time.sleep(0.5)
    assert "CANCELLED" in desk("why", run)
    if when == "step":
        assert [(a.cause, a.action) for a in desk.attempts(run)] == [("cancelled", "none")]
