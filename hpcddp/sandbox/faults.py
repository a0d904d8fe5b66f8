"""Rehearsal: how each fault is played. Each returns when the run can go on without help."""

from __future__ import annotations

import os
import signal
import time

from hpcddp.errors import SandboxError
from hpcddp.planning.jobfile import Layer
from hpcddp.record import read as read_record
from hpcddp.sandbox import daemons, own_processes
from hpcddp.sandbox.instants import EARLY, Fault
from hpcddp.sandbox.rehearsed_run import TIME, Stage
from hpcddp.sandbox.state import load
from hpcddp.slurm import commands as slurm
from hpcddp.submit import prepare, submission
from hpcddp.submit.status import current, rows_of, status

NOTICE = 40.0  # seconds that Slurm may take to preempt, or to end a job at its limit


def preempt(stage: Stage, fault: Fault, watch: float) -> None:
    """A job of higher priority wants the nodes."""
    job, hosts = stage.facts().job_id, ",".join(stage.hosts())
    options = ("--partition=high", "--exclusive", f"--nodelist={hosts}", "--output=/dev/null")
    with stage.held():
        slurm.call("sbatch", "--chdir=/", *options, "--wrap=sleep 1")
        stage.until(lambda: _told(stage, job, fault), "Slurm preempts", NOTICE)


def _told(stage: Stage, job: str, fault: Fault) -> bool:
    """Whether Slurm has sent the notice of a preemption, and so let the run go on."""
    found = slurm.facts(job)
    return stage.gone(fault.attempt) or not found or found.preempted or not found.running


def kill_node(stage: Stage, fault: Fault, watch: float) -> None:
    """A node is gone, with all that ran on it; it comes back when the run has."""
    node = fault.pick(stage.hosts())
    home = str(stage.sandbox.logs.parent)
    stage.sandbox.stop_daemon(f"slurmd-{node}", signal.SIGKILL)
    while left := own_processes.of_jobs(home, node):
        own_processes.end(left, signal.SIGKILL, 1.0)
    stage.until_after(fault.attempt)
    stage.sandbox.start_daemon(f"slurmd-{node}")
    stage.until(lambda: _back(stage, node), f"{node} is back")


def _back(stage: Stage, node: str) -> bool:
    known = load(stage.sandbox.folder)
    return known is not None and daemons.node_states(known)[node] in ("idle", "mixed", "allocated")


def timeout(stage: Stage, fault: Fault, watch: float) -> None:
    """The end of the time limit, which this life had from its beginning."""
    deadline = stage.limited()
    if not deadline:
        raise SandboxError("the job got no time limit", where=stage.run.name)
    # A program that knows no limit stands still until Slurm ends it, which can take Slurm a while.
    near = float("inf") if stage.clock else deadline - EARLY
    with stage.held():
        stage.until(lambda: time.time() > near or stage.gone(fault.attempt), "the time is up")
    stage.until(lambda: stage.gone(fault.attempt), "the time limit ends it", NOTICE + EARLY)
    stage.until(lambda: _unlimited(stage, fault), "the job has its old time limit")


def _unlimited(stage: Stage, fault: Fault) -> bool:
    """Give the job its old limit back before its next life; a follow-up job has it anyway."""
    job = str(current(stage.run))
    found = slurm.facts(job)
    if stage.number > fault.attempt:
        return True
    if found is None or found.state != "PENDING":
        return False
    done = slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={TIME}")
    return done.returncode == 0


def crash(stage: Stage, fault: Fault, watch: float) -> None:
    """A rank is killed."""
    own_processes.send([_rank(stage, fault)], signal.SIGKILL)


def hang(stage: Stage, fault: Fault, watch: float) -> None:
    """A rank stands still."""
    rank = _rank(stage, fault)
    own_processes.send([rank], signal.SIGSTOP)
    try:
        stage.until(lambda: stage.gone(fault.attempt), "the hang is found")
    finally:
        own_processes.end([rank], signal.SIGKILL, 10.0)


def _rank(stage: Stage, fault: Fault) -> own_processes.Process:
    """The rank that a fault hits, as soon as the ranks are known."""
    return fault.pick(stage.until(stage.ranks, "the ranks are there"))


def cancel(stage: Stage, fault: Fault, watch: float) -> None:
    """A person cancels the job; nothing may come back before he says so."""
    slurm.cancel(str(current(stage.run)))
    stage.until(lambda: status(stage.run).final and not _jobs(stage), "the job ends", ends=True)
    if (found := status(stage.run)).state == "COMPLETED":
        return
    deadline = time.monotonic() + watch
    while time.monotonic() < deadline:
        if _jobs(stage) or stage.number > fault.attempt or found.state != "CANCELLED":
            fault.failed = f"it was cancelled, and is {status(stage.run).state}"
            return
        time.sleep(0.5)
    plan = prepare.again(stage.run, Layer(), os.environ)
    submission.submit(plan, stage.run)


def _jobs(stage: Stage) -> list[str]:
    """The jobs of the run that live."""
    rows = rows_of(stage.run, slurm.queue(name=read_record(stage.run).name))
    return [row.job_id for row in rows if row.live]


PLAY = {
    "preempt": preempt,
    "kill-node": kill_node,
    "timeout": timeout,
    "crash": crash,
    "hang": hang,
    "cancel": cancel,
}
