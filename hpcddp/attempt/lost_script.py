"""Step 12 without the batch script: requeue its run, or end the wait of its requeued job.

The script's sentry does it or, if their node is lost, a process on another one.
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
from hpcddp.attempt import (
    decision,
    end_facts,
    error_record,
    launch_facts,
    ledger,
    log_reader,
    requeue,
)
from hpcddp.attempt.decision import End, Policy
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.errors import HpcddpError, SlurmUnreachable, SubmissionRefused
from hpcddp.rundir import RunDir, read_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import follow_up_jobs, hostlist

SOON = 3.0  # seconds for an answer if Slurm may kill this process soon
ANSWER = 60.0  # seconds for an answer that can wait
SLOWEST = 5.0  # seconds between two requests for the job's state
LATER = 4  # times slower for a process that has missed an attempt: its own node may have been lost
RELIEF = 20.0  # least seconds that a rank spends on a lost script's work


def bring_back(run: RunDir, number: int, node: int = 1) -> None:
    """Do for an attempt what its lost script would have done.

    Args:
        node: of this process, in its step: later ones ask less often.
    """
    late = max(1, node)
    pause, deadline = 0.3 * late, time.monotonic() + requeue.HOLD
    while time.monotonic() < deadline or (_outlives(run) and requeue.can_ask()):
        time.sleep(pause)  # first: all nodes begin at once
        pause = min(SLOWEST * late, 1.5 * pause)
        with contextlib.suppress(OSError, HpcddpError):
            if run.deleted():
                return
            mine = ledger.owner(run, number)
            if mine is None and (mine := _restarted(run, number)):  # and its node may be lost since
                number, late = mine.number, max(1, node) * LATER
            mine = mine and ledger.refreshed(run, mine)
            ended = mine is not None and mine.cause and mine.action != decision.HERE
            if mine is None or (ended and mine.action not in decision.RETURNS):
                return
            if ended and mine.host != os.uname().nodename:
                if not _runs_on(run, mine):
                    return  # the script's own sentry ends the wait
            elif ended or _settled(run, mine):
                _release(run, mine)
                return


def _release(run: RunDir, mine: Attempt) -> None:
    """Shorten the wait of a requeued job; choose its nodes too if its script has not."""
    if mine.action in (decision.LEFT, ""):
        mine.exclude = bad_nodes.excluded(run, record.read(run))
    requeue.release(mine)


def _restarted(run: RunDir, number: int) -> Attempt | None:
    """The newest attempt, if it is a restart of one in the same allocation."""
    before, newest = ledger.read(run.attempt(number)), ledger.last(run)
    if before is None or newest is None or newest.number == number or not _outlives(run):
        return None
    return newest if before.allocation == newest.allocation else None


def _settled(run: RunDir, mine: Attempt) -> bool:
    """Look up a job without a recorded end; whether only its wait is left to be ended, if it waits.
    A killed script gets a follow-up, and so does a job that Slurm has ended without its script;
    where Slurm tracks processes by cgroup, no process lives to see that.

    Raises:
        SlurmUnreachable: Slurm does not answer.
    """
    job = slurm.facts(mine.job_id)
    if job is None or job.restarts > mine.restarts:
        return True
    cause = decision.KILLED if end_facts.was_killed(run, mine, job) else ""
    if not (mine.node in ("", error_record.host()) or log_reader.ending_of(mine)):
        cause = cause or decision.OF_STATE.get(job.state, "")  # else its sentry sees to that
    if cause:
        if would_follow(run, mine, cause):
            _note_follow_up(run, mine, cause, submit(run, mine, ask=True))
        return True
    if job.running:
        _runs_on(run, mine)
    return not (job.running or job.state == "COMPLETING")


def _outlives(run: RunDir) -> bool:
    """Whether Slurm does not end the job when a node of it is lost."""
    with contextlib.suppress(OSError, HpcddpError, LookupError, TypeError):
        return launch_facts.outlives_nodes(record.read(run))
    return False


def _runs_on(run: RunDir, mine: Attempt) -> bool:
    """Whether a job still runs that Slurm does not end when the script's node is lost. Once Slurm
    has that node down, or has taken it out of the job, end the job; the next call shows it.

    Raises:
        SlurmUnreachable: Slurm does not answer.
    """
    if mine.node in ("", error_record.host()) or not _outlives(run):
        return False
    if (job := _same(mine)) is None:
        return False
    left = job.nodes and mine.node not in hostlist.expand_hosts(job.nodes)
    if left or slurm.node_failed(mine.node, ANSWER):  # which may be back already
        _end_headless(run, mine)
    return True


def _same(mine: Attempt) -> slurm.JobInfo | None:
    """The job of an attempt, if it runs, and has not been requeued since."""
    job = slurm.facts(mine.job_id)
    return job if job and job.running and job.restarts == mine.restarts else None


def _end_headless(run: RunDir, mine: Attempt) -> None:
    """Requeue a job that runs on without its script, or follow it, or end it, unless Slurm or a
    person ends it meanwhile.

    Raises:
        SlurmUnreachable: Slurm does not answer.
    """
    asked = (read_json(run.request) or {}).get("want") in ("stop", "cancel")
    followed = mine.action == decision.FOLLOW  # the other job waits for the end of this one
    if not (asked or followed) and _returns(run, mine):
        return
    if _same(mine):
        slurm.cancel(mine.job_id)


def _returns(run: RunDir, mine: Attempt) -> bool:
    """Let a run without its script continue; false if its job is only to be ended.

    A follow-up is better where Slurm would hold the job, but for an element of an array, which it
    would leave, and for a script that has chosen the way itself.
    """
    follows = bool(mine.successor) or would_follow(run, mine, decision.NODE)
    ways = [_requeued, _followed] if follows else [_requeued]
    if requeue.is_held(mine) and "_" not in mine.job_id and mine.action != decision.AGAIN:
        ways.reverse()
    for way in ways:
        if not _same(mine) or way(run, mine):  # a person may have ended it, or Slurm requeued it
            return True
    if follows and _same(mine):
        _note_follow_up(run, mine, decision.NODE, "")
    return False


def _requeued(run: RunDir, mine: Attempt) -> bool:
    """Requeue the job, if Slurm lets us."""
    if slurm.requeue(mine.job_id):
        return False
    _release(run, mine)
    return True


def _followed(run: RunDir, mine: Attempt) -> bool:
    """Submit a follow-up, if Slurm takes it, and end the job. The script may have submitted one.

    One that a person has ended meanwhile is not noted: the follow-up sees that, and leaves.
    """
    job_id = mine.successor or submit(run, mine, ask=True)
    if job_id and mine.action == decision.AGAIN:  # it may wait for a good end of this job
        waits = follow_up_jobs.wait_for_any_end(job_id, mine.job_id, ANSWER)
        job_id = job_id if waits else submit(run, mine, ask=False)
    if job_id and _same(mine) and _note_follow_up(run, mine, decision.NODE, job_id):
        slurm.cancel(mine.job_id)
    return bool(job_id)


def _note_follow_up(run: RunDir, mine: Attempt, cause: str, job_id: str) -> bool:
    """Record the end of an attempt whose script cannot, and the job that follows: Slurm forgets the
    old one after some minutes, and the new one may wait longer. False if the script or another node
    has recorded something meanwhile, which counts."""
    known = ledger.owner(run, mine.number)
    if known is None or (known.ended, known.action) != (mine.ended, mine.action):
        return False
    now = replace(mine, ended=time.time(), exit_code=128 + signal.SIGKILL, saved=None)
    now.cause, now.action, now.gained = cause, decision.FOLLOW, None
    if not job_id:
        now.action, now.reason = decision.NONE, "Slurm refused the follow-up job"
    requeue.note(run, replace(now, successor=job_id))
    return True


def would_follow(run: RunDir, mine: Attempt, cause: str) -> bool:
    """Whether a job that Slurm ends for this cause is followed, within the run's budgets.

    Raises:
        SlurmUnreachable: Slurm may have requeued the job itself.
    """
    want = str((read_json(run.request) or {}).get("want", ""))
    cancels = mine.site.get("preempt_mode") == "CANCEL"
    if cause == decision.NODE or (cause == decision.PREEMPTED and not cancels):
        try:
            job = slurm.facts(mine.job_id, ANSWER if mine.site else SOON)
        except SlurmUnreachable:
            if mine.site:
                raise
            job = None  # no time to ask again
        if job and job.restarts > mine.restarts:
            return False
    end = End(
        128 + signal.SIGKILL, "COMPLETING", want=want, killed=cause == decision.KILLED,
        ending="" if cause == decision.KILLED else cause, progress=ledger.progress_of(run, mine),
    )  # fmt: skip
    policy = Policy.of(record.read(run).spec.get("requeue", {}))
    owned = ledger.owner(run, mine.number)
    # The script may have recorded an action that it could not complete.
    ends = owned is None or bool(owned.successor)
    ends = ends or bool(owned and owned.cause and owned.action not in decision.RETURNS)
    return not ends and decision.decide(end, requeue.past(run), policy).action == decision.FOLLOW


def submit(run: RunDir, mine: Attempt, *, ask: bool) -> str:
    """Submit an attempt's follow-up; the job's id, "" if Slurm refuses it.

    Args:
        ask: first look for a waiting follow-up: an answer may have been lost.

    Raises:
        SlurmUnreachable: there may be one or not.
    """
    words, job = [str(mine.number), requeue.LOOK], record.read(run)
    try:
        if ask:
            job_id = requeue.follow_up(run, mine, job.name, words, ok=False, wait=ANSWER)
        else:
            job_id = follow_up_jobs.successor(
                run.script, words, mine.job_id, ok=False, timeout=ANSWER
            )
    except SubmissionRefused:  # perhaps as another node's came first
        return requeue.submitted(run, mine, job.name, ANSWER)
    requeue.reuse(job_id, bad_nodes.still_excluded(job))
    return job_id


def relieve(run: RunDir, number: int) -> None:
    """In a rank that leaves: do the work of a lost script of this node.

    If Slurm tracks processes by cgroup, the script's sentry is lost too.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    with contextlib.suppress(OSError, HpcddpError, subprocess.TimeoutExpired):
        mine = ledger.read(run.attempt(number))
        here = mine and mine.slurm and mine.host == os.uname().nodename
        if mine and here and processes.start_of(mine.pid) != mine.pid_start:
            left = float(ledger.refreshed(run, mine).site.get("kill_wait", RELIEF))
            words, most = command(run, number), max(RELIEF, left)
            subprocess.run(words, env=environment(), check=False, timeout=most)


def command(run: RunDir, number: int, node: int = 1) -> list[str]:
    """The command that runs ``bring_back`` in another process."""
    words = ["bereaved", str(run.path), str(number), str(node)]
    return [sys.executable, "-I", str(run.host), *words]


def environment() -> dict[str, str]:
    """The environment of that process: this one's, but it is none of the step's tasks."""
    return {name: value for name, value in os.environ.items() if name != "SLURM_PROCID"}
