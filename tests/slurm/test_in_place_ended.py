"""Slurm ends the job in the middle of a restart in place: nothing that was announced is lost, and
nothing comes back that is not to."""

import os
import signal
from typing import Any

import pytest

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir

from .desk import Desk, pids, wait_for
from .test_hardships import Site, site
from .test_survive import SIZE, finished, lost

__all__ = ["site"]


def restarting(desk: Desk, run: str) -> RunDir:
    """Kill a rank, and wait until its attempt is over and the next one is to begin."""
    folder = RunDir(desk.training(run, step=30)["path"])
    os.kill(pids(folder)[1], signal.SIGKILL)

    def over() -> bool:
        first = ledger.read(folder.attempt(1))
        return bool(first and first.action == "here")

    wait_for(over)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "same"),
    [
        ({"grace": 10, "kill_wait": 10}, True),
        # Within the grace time the job is requeued, and then Slurm has nothing to cancel.
        ({"preempt_mode": "CANCEL", "grace": 10, "kill_wait": 10}, True),
        ({"preempt_mode": "CANCEL", "grace": 0, "kill_wait": 10}, False),
    ],
    ids=["requeue", "cancel", "cancel, no grace"],
)
@pytest.mark.parametrize("launcher", ["fork", "srun"])
def test_a_preemption_in_the_middle_of_it_loses_nothing(
    site: Site, how: dict[str, Any], same: bool, launcher: str
) -> None:
    desk = site(**how)
    run = desk.submit(*SIZE, "--launcher", launcher, "--set", "checkpoint.every=20")
    folder = restarting(desk, run)
    desk.take_all_nodes()
    finished(desk, run)
    first, *between, last = desk.attempts(run)
    assert (first.cause, first.action, last.cause) == ("crash", "here", "done")
    assert "preempted" in [attempt.cause for attempt in between]
    assert (first.job_id == last.job_id) == same
    if launcher == "fork":
        assert lost(folder) == 0
    else:  # by the kill alone
        assert lost(folder) <= 20 + 12


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["fork", "srun", "torchrun"])
def test_a_preemption_told_between_two_attempts_stops_the_next_one(
    site: Site, launcher: str
) -> None:
    """Slurm signals the steps that there are: none, under srun."""
    desk = site(preempt_mode="CANCEL", grace=60, kill_wait=10)
    run = desk.submit(*SIZE, "--launcher", launcher, "--set", "checkpoint.every=20")
    restarting(desk, run)
    (first,) = desk.attempts(run)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        desk.take_all_nodes()
        words = ("scontrol", "show", "job", first.job_id)
        wait_for(lambda: "PreemptTime=2" in desk.slurm.run(*words, check=True).stdout)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    finished(desk, run)
    assert [attempt.cause for attempt in desk.attempts(run)] == ["crash", "preempted", "done"]
    assert {attempt.job_id for attempt in desk.attempts(run)} == {first.job_id}


@pytest.mark.full
def test_a_time_limit_in_the_middle_of_it_loses_nothing(desk: Desk) -> None:
    run = desk.submit(*SIZE, "--time", "30", "--set", "dataset.pause=0.1")
    folder = restarting(desk, run)
    job = desk.attempts(run)[0].job_id
    desk.slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1", check=True)
    finished(desk, run)
    first, *between, last = desk.attempts(run)
    assert (first.cause, first.action, last.cause) == ("crash", "here", "done")
    assert "time limit" in [attempt.cause for attempt in between]
    assert lost(folder) == 0
