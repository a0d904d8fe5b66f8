"""Step 12 where the batch script is gone: bring its run back, or end the wait of its job.

The sentry beside the script does it, or, where that went with its node, a rank on another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from hpcddp import processes, record
from hpcddp.attempt import decision, end_facts, ledger, requeue
from hpcddp.attempt.decision import End, Policy
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import HpcddpError, SlurmUnreachable, SubmissionRefused
from hpcddp.rundir import RunDir, read_json
from hpcddp.slurm import commands as slurm

SOON = 3.0  # seconds for an answer where Slurm may kill this process before
ANSWER = 60.0  # seconds for an answer where nothing else is in a hurry
SLOWEST = 5.0  # seconds between two questions of what has become of the job
RELIEF = 20.0  # least seconds that a rank spends on a script that is gone


def bring_back(run: RunDir, number: int) -> None:
    """Do for an attempt whose script is gone what the script would have done."""
    pause, deadline = 0.3, time.monotonic() + requeue.HOLD
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, HpcddpError):
            if run.deleted():
                return
            mine = ledger.owner(run, number)
            here = mine is not None and mine.host == os.uname().nodename
            if mine is None or (mine.cause and (mine.action not in decision.RETURNS or not here)):
                return  # elsewhere the script's own sentry ends the wait
            if mine.cause or _settled(run, mine):
                requeue.release(mine)
                return
        time.sleep(pause)
        pause = min(SLOWEST, 1.5 * pause)


def _settled(run: RunDir, mine: Attempt) -> bool:
    """Ask what has become of a job that left no end; whether nothing is left but to end its wait,
    if it waits. A script that was killed is followed.

    Raises:
        SlurmUnreachable: Slurm does not answer.
    """
    job = slurm.facts(mine.job_id)
    if job is None or job.restarts > mine.restarts:
        return True
    if end_facts.was_killed(run, mine, job):
        if would_follow(run, mine, decision.KILLED):
            # Slurm forgets the proof after some minutes, and the follow-up may wait for longer.
            job_id = submit(run, mine, ask=True)
            now = replace(mine, ended=time.time(), exit_code=128 + signal.SIGKILL, saved=None)
            now.cause, now.action, now.gained = decision.KILLED, decision.FOLLOW, None
            requeue.note(run, replace(now, successor=job_id))
        return True
    return not (job.running or job.state == "COMPLETING")


def would_follow(run: RunDir, mine: Attempt, cause: str) -> bool:
    """Whether a job that Slurm ends for this cause is followed, within the run's budgets.

    Raises:
        SlurmUnreachable: whether Slurm has queued it again itself is not known.
    """
    want = str((read_json(run.request) or {}).get("want", ""))
    cancels = mine.site.get("preempt_mode") == "CANCEL"
    if cause == decision.NODE or (cause == decision.PREEMPTED and not cancels):
        try:
            job = slurm.facts(mine.job_id, ANSWER if mine.site else SOON)
        except SlurmUnreachable:
            if mine.site:
                raise
            job = None  # there may be no time to ask again
        if job and job.restarts > mine.restarts:
            return False
    end = End(
        128 + signal.SIGKILL, "COMPLETING", want=want, killed=cause == decision.KILLED,
        ending="" if cause == decision.KILLED else cause, progress=ledger.progress_of(run, mine),
    )  # fmt: skip
    policy = Policy.of(record.read(run).spec.get("requeue", {}))
    owned = ledger.owner(run, mine.number)
    # What the script has written down may be an intention that it could not carry out any more.
    ends = owned is None or bool(owned.successor)
    ends = ends or bool(owned and owned.cause and owned.action not in decision.RETURNS)
    return not ends and decision.decide(end, requeue.past(run), policy).action == decision.FOLLOW


def submit(run: RunDir, mine: Attempt, *, ask: bool) -> str:
    """Have an attempt followed; the job's id, "" where Slurm does not take it.

    Args:
        ask: whether a follow-up waits already: an answer may have been lost.

    Raises:
        SlurmUnreachable: whether one waits is not known.
    """
    words = [str(mine.number), requeue.LOOK]
    try:
        if ask:
            name = record.read(run).name
            return requeue.follow_up(run, mine, name, words, ok=False, wait=ANSWER)
        return slurm.successor(run.script, words, mine.job_id, ok=False, timeout=ANSWER)
    except SubmissionRefused:
        return ""


def relieve(run: RunDir, number: int) -> None:
    """For a rank that leaves: do what the script would, if that was on this node, and is gone.

    Where cgroups track processes, the sentry went with it.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    with contextlib.suppress(OSError, HpcddpError, subprocess.TimeoutExpired):
        mine = ledger.read(run.attempt(number))
        here = mine and mine.slurm and mine.host == os.uname().nodename
        if mine and here and processes.start_of(mine.pid) != mine.pid_start:
            left = float(ledger.refreshed(run, mine).site.get("kill_wait", RELIEF))
            subprocess.run(command(run, number), check=False, timeout=max(RELIEF, left))


def command(run: RunDir, number: int) -> list[str]:
    """The command that brings a run back from another process."""
    return [sys.executable, "-I", str(run.host), "bereaved", str(run.path), str(number)]
