"""After a failure of ranks, the next attempt starts in the same allocation: nothing is queued."""

import contextlib
import os
import signal
from pathlib import Path

import pytest

from hpcddp.attempt import ledger, sentry
from hpcddp.rundir import RunDir

from .desk import LONG, Desk, pids, wait_for
from .test_survive import SIZE, finished, killed, lost, resumed

HERE = ("--set", "requeue.here=true", "--set", "checkpoint.every=20")


def restarts(desk: Desk, job_id: str) -> str:
    """Slurm's count of a job's requeues."""
    words = desk.slurm.run("scontrol", "--oneliner", "show", "job", job_id, check=True).stdout
    return next(word for word in words.split() if word.startswith("Restarts="))


def sentries(run: RunDir) -> list[str]:
    """The process ids of the sentries beside a run's script."""
    there = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if (
                str(run.host).encode() in words
                and (path / "comm").read_text().strip() == sentry.NAME
            ):
                there.append(path.name)
    return there


def test_a_killed_rank_restarts_in_place_and_a_preemption_follows(desk: Desk) -> None:
    run = desk.submit(*SIZE, *HERE)
    told = desk.training(run, step=30)
    folder = RunDir(told["path"])
    wait_for(lambda: killed(folder))
    desk.training(run, attempt=2)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.job_id) == ("crash", "here", first.job_id)
    assert first.ended and second.began - first.ended < 5  # a requeued job waits longer
    assert (restarts(desk, first.job_id), resumed(folder, 2)) == ("Restarts=0", first.saved)
    assert second.said == first.said and second.deadline == first.deadline
    wait_for(lambda: len(sentries(folder)) == 1)
    desk.take_all_nodes()
    finished(desk, run)
    first, second, third = desk.attempts(run)
    assert (second.cause, second.action) == ("preempted", "requeue")
    assert (third.cause, third.job_id, resumed(folder, 3)) == ("done", first.job_id, second.saved)
    assert lost(folder) <= 20 + 12  # by the kill alone
    assert "crash" in desk("why", run) and "here" in desk("why", run)


@pytest.mark.parametrize("launcher", ["fork", "torchrun"])
def test_each_launcher_restarts_in_place(desk: Desk, launcher: str) -> None:
    run = desk.submit(*SIZE, *HERE, "--launcher", launcher)
    folder = RunDir(desk.training(run, step=30)["path"])
    wait_for(lambda: killed(folder))
    finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.cause, first.action, second.cause) == ("crash", "here", "done")
    assert restarts(desk, first.job_id) == "Restarts=0"


def test_what_a_person_cancels_in_the_middle_of_it_stays_so(desk: Desk) -> None:
    run = desk.submit(*LONG, *SIZE[4:], *HERE)
    told = desk.training(run, step=30)
    folder = RunDir(told["path"])
    os.kill(pids(folder)[1], signal.SIGKILL)

    def restarting() -> bool:
        first = ledger.read(folder.attempt(1))
        return bool(first and first.action == "here")

    wait_for(restarting)
    desk.slurm.run("scancel", told["job_id"], check=True)
    desk.until(lambda s: s["state"] == "CANCELLED", run)
    wait_for(lambda: not desk.slurm.run("squeue", "--noheader", check=True).stdout)
    assert len(desk.attempts(run)) <= 2
