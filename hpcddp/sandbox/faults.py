"""Rehearsal: how each fault is played. Each returns when the run can go on without help."""

from __future__ import annotations

import os
import signal
import time

from hpcddp.errors import SandboxError
from hpcddp.planning.jobfile import Layer
from hpcddp.record import read as read_record
from hpcddp.sandbox import daemons, own_processes, time_limits
from hpcddp.sandbox.fault_times import EARLY, Fault
from hpcddp.sandbox.rehearsed_run import RehearsedRun
from hpcddp.sandbox.state import load
from hpcddp.slurm import commands as slurm
from hpcddp.submit import prepare, submission
from hpcddp.submit.status import current, rows_of, status

NOTICE = 40.0  # seconds that Slurm may take to preempt, or to end a job at its limit


def preempt(rehearsed: RehearsedRun, fault: Fault, watch: float) -> None:
    """A job of higher priority wants the nodes."""
    job, hosts = rehearsed.facts().job_id, ",".join(rehearsed.hosts())
    options = ("--partition=high", "--exclusive", f"--nodelist={hosts}", "--output=/dev/null")
    with rehearsed.held():
        slurm.call("sbatch", "--chdir=/", *options, "--wrap=sleep 1")
        rehearsed.until(lambda: _told(rehearsed, job, fault), "Slurm preempts", NOTICE)


def _told(rehearsed: RehearsedRun, job: str, fault: Fault) -> bool:
    """Whether Slurm has sent the notice of a preemption, and so let the run go on."""
    found = slurm.facts(job)
    return rehearsed.gone(fault.attempt) or not found or found.preempted or not found.running


def kill_node(rehearsed: RehearsedRun, fault: Fault, watch: float) -> None:
    """A node is gone, with all that ran on it; it comes back when the run has."""
    node = fault.pick(rehearsed.hosts())
    home = str(rehearsed.sandbox.logs.parent)
    rehearsed.sandbox.stop_daemon(f"slurmd-{node}", signal.SIGKILL)
    while left := own_processes.of_jobs(home, node):
        own_processes.end(left, signal.SIGKILL, 1.0)
    rehearsed.until_after(fault.attempt)
    rehearsed.sandbox.start_daemon(f"slurmd-{node}")
    rehearsed.until(lambda: _back(rehearsed, node), f"{node} is back")


def _back(rehearsed: RehearsedRun, node: str) -> bool:
    known = load(rehearsed.sandbox.folder)
    return known is not None and daemons.node_states(known)[node] in ("idle", "mixed", "allocated")


def timeout(rehearsed: RehearsedRun, fault: Fault, watch: float) -> None:
    """The end of the time limit, which this life had from its beginning."""
    deadline = time_limits.deadline(rehearsed.facts())
    if not deadline:
        raise SandboxError("the job got no time limit", where=rehearsed.run.name)
    # A program that knows no limit stands still until Slurm ends it, which can take Slurm a while.
    near = float("inf") if rehearsed.clock else deadline - EARLY
    with rehearsed.held():
        rehearsed.until(
            lambda: time.time() > near or rehearsed.gone(fault.attempt), "the time is up"
        )
    rehearsed.until(lambda: rehearsed.gone(fault.attempt), "the time limit ends it", NOTICE + EARLY)
    rehearsed.until(lambda: _unlimited(rehearsed, fault), "the job has its old time limit")


def _unlimited(rehearsed: RehearsedRun, fault: Fault) -> bool:
    """Give the job its old limit back before its next life; a follow-up job has it anyway."""
    job = str(current(rehearsed.run))
    found = slurm.facts(job)
    if rehearsed.number > fault.attempt:
        return True
    if found is None or found.state != "PENDING":
        return False
    done = slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={time_limits.USUAL}")
    return done.returncode == 0


def crash(rehearsed: RehearsedRun, fault: Fault, watch: float) -> None:
    """A rank is killed."""
    own_processes.send([_rank(rehearsed, fault)], signal.SIGKILL)


def hang(rehearsed: RehearsedRun, fault: Fault, watch: float) -> None:
    """A rank stands still."""
    rank = _rank(rehearsed, fault)
    own_processes.send([rank], signal.SIGSTOP)
    try:
        rehearsed.until(lambda: rehearsed.gone(fault.attempt), "the hang is found")
    finally:
        own_processes.end([rank], signal.SIGKILL, 10.0)


def _rank(rehearsed: RehearsedRun, fault: Fault) -> own_processes.Process:
    """The rank that a fault hits, as soon as the ranks are known."""
    return fault.pick(rehearsed.until(rehearsed.ranks, "the ranks are there"))


def cancel(rehearsed: RehearsedRun, fault: Fault, watch: float) -> None:
    """A person cancels the job; nothing may come back before he says so."""
    slurm.cancel(str(current(rehearsed.run)))
    rehearsed.until(
        lambda: status(rehearsed.run).final and not _jobs(rehearsed), "the job ends", ends=True
    )
    if (found := status(rehearsed.run)).state == "COMPLETED":
        return
    deadline = time.monotonic() + watch
    while time.monotonic() < deadline:
        if _jobs(rehearsed) or rehearsed.number > fault.attempt or found.state != "CANCELLED":
            fault.failed = f"it was cancelled, and is {status(rehearsed.run).state}"
            return
        time.sleep(0.5)
    plan = prepare.again(rehearsed.run, Layer(), os.environ)
    submission.submit(plan, rehearsed.run)


def _jobs(rehearsed: RehearsedRun) -> list[str]:
    """The jobs of the run that live."""
    rows = rows_of(rehearsed.run, slurm.queue(name=read_record(rehearsed.run).name))
    return [row.job_id for row in rows if row.live]


PLAY = {
    "preempt": preempt,
    "kill-node": kill_node,
    "timeout": timeout,
    "crash": crash,
    "hang": hang,
    "cancel": cancel,
}
