"""Nodes of a job that is starved, suspended or without a parent for a while are not lost.

BUSY_SECONDS has the seconds under load, if not a minute.
"""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from hpcddp.rundir import RunDir, read_step

from .desk import LONG, Desk, wait_for
from .test_in_place import parents

SECONDS = float(os.environ.get("BUSY_SECONDS", "60"))
BUSY = 8
HEARTBEAT = 10.0  # seconds of silence after which a node is lost


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that use all CPU time that they get."""
    processes = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def passes(seconds: float, run: RunDir) -> None:
    """Wait, and see that the first attempt goes on afterwards."""
    time.sleep(seconds)
    step = read_step(run.attempt(1))[0]
    wait_for(lambda: read_step(run.attempt(1))[0] > step)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(SECONDS + 900)
def test_no_node_of_a_starved_or_suspended_job_is_lost(desk: Desk) -> None:
    run = desk.submit(*LONG, "--nodes", "2", "--gpus", "2", "--spares", "1", "--time", "2:00:00")
    told = desk.training(run, step=30)
    folder = RunDir(told["path"])
    with busy(BUSY):
        passes(SECONDS, folder)
    desk.slurm.run("scontrol", "suspend", told["job_id"], check=True)
    time.sleep(1.5 * HEARTBEAT)
    desk.slurm.run("scontrol", "resume", told["job_id"], check=True)
    passes(1.5 * HEARTBEAT, folder)
    parent = parents(folder, 1).pop()
    os.kill(parent, signal.SIGSTOP)
    try:
        passes(1.5 * HEARTBEAT, folder)
    finally:
        os.kill(parent, signal.SIGCONT)
    passes(1.5 * HEARTBEAT, folder)
    desk("stop", run)
    desk.until(lambda s: s["state"] not in ("RUNNING", "COMPLETING"), run)
    assert [(a.cause, a.job_id) for a in desk.attempts(run)] == [("stopped", told["job_id"])]
    assert "lost node" not in folder.attempt(1).log.read_text()
