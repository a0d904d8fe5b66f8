"""Step 12, the action: requeue a run, from its batch script.

The job itself is requeued if that is quick; else a follow-up job continues the run. A request
without an answer may have been carried out: its result is looked up before anything else is tried.
If both ways were used, the next attempt of the job itself cancels its follow-up.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpcddp.attempt import decision, launch_facts, ledger, log_reader
from hpcddp.attempt.decision import Decision, Past
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.errors import RunError, SlurmMissing, SlurmUnreachable, SubmissionRefused
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import follow_up_jobs
from hpcddp.slurm.rules import Site

PATIENCE = 3600.0  # seconds until a controller that does not answer is given up
LONGEST, LEAST = 60.0, 3.0  # seconds to wait for one answer
TRIES = 3  # requests of one way without an answer
PAUSE = 3.0  # seconds between two requests
HOLD = 900.0  # seconds for which a requeued job is looked up
LOOK = "look"  # a follow-up's second argument: its parent has not decided whether it is needed
HELD = 10  # seconds of Slurm's own wait that a follow-up is better than
SETTLE = 4  # seconds between two attempts: clocks of nodes differ a little


def patience(mine: Attempt, *, ends: bool) -> float:
    """Seconds to wait for an answer of Slurm: until the job's end, LONGEST at most.

    Args:
        ends: Slurm is ending the job, or has announced it.
    """
    rules = Site(**mine.site) if mine.site else Site()
    left = rules.notice if ends else (mine.deadline or math.inf) - time.time() + rules.kill_wait
    return min(LONGEST, max(LEAST, left))


def ask(mine: Attempt, most: float = PATIENCE) -> slurm.JobInfo | None:
    """Slurm's facts about the job; waits for the controller, None without an answer.

    Args:
        most: seconds to wait.
    """
    deadline = time.monotonic() + most
    while True:
        try:
            return slurm.facts(mine.job_id, min(most, patience(mine, ends=False)))
        except SlurmUnreachable as error:
            if time.monotonic() + PAUSE > deadline or not can_ask():
                return None
            print(f"hpcddp: {error.what}; asking again", flush=True)
            time.sleep(PAUSE)


def can_ask() -> bool:
    """Whether any of Slurm's programs is installed, and may answer later."""
    return any(os.access(Path(p, name), os.X_OK) for p in os.get_exec_path()
               for name in ("scontrol", "squeue", "sbatch"))  # fmt: skip


def bring_back(run: RunDir, mine: Attempt, verdict: Decision, job: JobRecord) -> str:
    """Requeue the run, by the first way that works; returns what the script does then. Empty if
    Slurm is ending the job, so that the decision must be made again."""
    if not mine.slurm:
        return "again"
    if verdict.action == decision.HERE:
        return _stay(run, mine)
    mine.exclude = bad_nodes.excluded(run, job)
    if mine.exclude is not None:
        note(run, mine)
    ways = [follow] if verdict.action == decision.FOLLOW else [back, follow]
    if verdict.action == decision.AGAIN and prefers_follow(mine, job):
        ways.reverse()
    verb = {back: decision.AGAIN, follow: decision.FOLLOW}
    deadline, refused, tries = time.monotonic() + PATIENCE, "", 0
    while time.monotonic() < deadline:
        for way in ways:
            try:
                way(run, mine, verdict, job)
                return "0"
            except RunError as error:
                print(f"hpcddp: {error.what}", flush=True)
                return ""
            except (SlurmUnreachable, SubmissionRefused) as error:
                refused, failed = error.what, error
            print(f"hpcddp: {verb[way]} failed: {refused}", flush=True)
            if isinstance(failed, SlurmUnreachable) and not isinstance(failed, SlurmMissing):
                tries += 1
                if tries % TRIES:  # look up the request by the same way
                    break
                if _is_back(mine):
                    return "0"
        if not can_ask():
            break
        time.sleep(PAUSE)
    reason = f"could not be requeued ({refused}); `hpcddp resume {run.name}` continues"
    ledger.end(run, mine.number, mine.exit_code or 0, verdict.cause, decision.NONE, reason)
    return "1"


def _stay(run: RunDir, mine: Attempt) -> str:
    """Go on in the same allocation, unless Slurm or a user has ended the job since the decision.
    Slurm's messages so far are not about the next attempt."""
    upto = log_reader.sizes(mine)
    if log_reader.ending_of(mine) or read_json(run.request):
        return ""
    pass_over(run, mine, upto)
    return decision.HERE


def _is_back(mine: Attempt) -> bool:
    """Whether Slurm has requeued the job, if it answers."""
    with contextlib.suppress(SlurmUnreachable):
        known = slurm.facts(mine.job_id, patience(mine, ends=False))
        return bool(known and known.restarts > mine.restarts)
    return False


def prefers_follow(mine: Attempt, job: JobRecord) -> bool:
    """Whether a follow-up is better: if Slurm tracks processes by cgroup, or no longer lets the job
    be changed, no process can end a requeued job's wait, and a follow-up does not wait.

    An array's element is requeued all the same: a follow-up would leave its array.
    """
    if "_" in mine.job_id:
        return False
    if is_held(mine):
        return True
    with contextlib.suppress(SlurmUnreachable):
        known = slurm.facts(mine.job_id) if launch_facts.outlives_nodes(job) else None
        return bool(known and known.resized) and not slurm.takes_updates(mine.job_id)
    return False


def is_held(mine: Attempt) -> bool:
    """Whether Slurm holds the job for minutes once it is requeued, and no process of it lives on to
    end that."""
    rules = Site(**mine.site) if mine.site else Site(tracking="linuxproc")
    return not rules.outlives and rules.hold > HELD


def back(run: RunDir, mine: Attempt, verdict: Decision, job: JobRecord) -> None:
    """Requeue this job itself, while it runs.

    The sentry, which outlives this job if Slurm allows it, ends the wait.

    Raises:
        RunError: Slurm is ending the job.
        SlurmUnreachable: it may be requeued or not.
        SubmissionRefused: Slurm refused.
    """
    known = slurm.facts(mine.job_id, patience(mine, ends=False))
    if known and known.restarts > mine.restarts:
        return
    if known and not known.running:
        raise RunError(f"the job is {known.state} now")
    ends = known is None or known.preempted
    if refused := slurm.requeue(mine.job_id, patience(mine, ends=ends)):
        raise SubmissionRefused(refused)


def follow(run: RunDir, mine: Attempt, verdict: Decision, job: JobRecord) -> None:
    """Submit the script as a new job that continues after this one.

    Raises:
        SlurmUnreachable: it may be submitted or not.
        SubmissionRefused: Slurm refused.
    """
    runs = verdict.action == decision.AGAIN  # until its script leaves, with 0
    preempted = runs and verdict.cause == decision.PREEMPTED
    ok = runs and not preempted
    wait = patience(mine, ends=not runs)
    mine.successor = follow_up(run, mine, job.name, [str(mine.number)], ok=ok, wait=wait)
    note(run, mine)
    print(f"hpcddp: job {mine.successor} continues", flush=True)
    if preempted:
        follow_up_jobs.end_for_good(mine.job_id, wait)
    if not mine.exclude:
        reuse(mine.successor, mine.exclude)


def submitted(run: RunDir, mine: Attempt, name: str, wait: float) -> str:
    """The job that follows an attempt already; "" if there is none.

    Raises:
        SlurmUnreachable: there may be one.
    """
    with contextlib.suppress(SlurmMissing):
        for job_id, number in follow_up_jobs.follow_ups(run.script, name, wait).items():
            if number == mine.number:
                return job_id
    return ""


def follow_up(
    run: RunDir, mine: Attempt, name: str, arguments: Sequence[str], *, ok: bool, wait: float
) -> str:
    """The job that follows an attempt: one that waits already, as an answer may have been lost, or
    a new one. Raises as ``follow_up_jobs.successor``."""
    return submitted(run, mine, name, wait) or follow_up_jobs.successor(
        run.script, arguments, mine.job_id, ok=ok, exclude=mine.exclude or "", timeout=wait
    )


def reuse(job_id: str, exclude: str | None) -> None:
    """Let a waiting follow-up use the nodes that its script has excluded for long enough.

    Args:
        exclude: the others; None for all that the script excludes.
    """
    if exclude is not None:
        with contextlib.suppress(SlurmUnreachable):
            slurm.release(job_id, exclude=exclude)


def drop(run: RunDir, name: str, *, upto: int, but: str, wait: float = slurm.TIMEOUT) -> None:
    """Cancel the jobs that wait to follow an attempt, up to this number.

    Args:
        but: the asking job, which may be one itself.

    Raises:
        SlurmUnreachable: there may be some.
    """
    for job_id, number in follow_up_jobs.follow_ups(run.script, name, wait).items():
        if number <= upto and job_id != but:
            slurm.cancel(job_id, state="PENDING", timeout=wait)


def note(run: RunDir, facts: Attempt) -> None:
    """Record an attempt's facts; a full disk is no reason to stop."""
    try:
        write_json(run.attempt(facts.number).facts, asdict(facts))
    except OSError as error:
        print(f"hpcddp: not recorded: {error}", flush=True)


def past(run: RunDir) -> list[Past]:
    """The earlier attempts that count: those since the run was last resumed."""
    earlier = ledger.attempts(run)[:-1]
    ends = [i for i, attempt in enumerate(earlier) if attempt.action not in decision.RETURNS]
    since = earlier[ends[-1] + 1 :] if ends else earlier
    return [Past(attempt.cause or "", attempt.progress) for attempt in since]


def pass_over(run: RunDir, mine: Attempt, upto: tuple[int, int]) -> None:
    """Ignore Slurm's messages up to here: they were about a signal for the batch script alone."""
    mine.said_size, mine.node_log_size = upto
    note(run, mine)


def release(mine: Attempt) -> None:
    """Shorten the wait of a requeued job: Slurm holds it for two minutes.

    The reason: a node refuses a credential that is not younger than the end of the job's last
    attempt there, in seconds. So the next one starts SETTLE seconds after all nodes have released
    the job; until then the wait cannot be changed. Where another process has shortened it, it stays
    as it is. A job that was cancelled meanwhile stays so; one that was cancelled just before it was
    requeued is cancelled again.
    """
    pause, deadline = 0.3, time.monotonic() + HOLD
    while time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnreachable):
            known = slurm.facts(mine.job_id)
            if known is None or not (known.running or known.state in ("COMPLETING", "PENDING")):
                return
            if known.running and known.restarts > mine.restarts:  # its next attempt
                return
            if known.state == "PENDING":
                if log_reader.ending_of(mine) == decision.CANCELLED:
                    slurm.cancel(mine.job_id)
                    return
                soon = known.eligible is not None and known.eligible <= time.time() + SETTLE
                when = None if soon else f"now+{SETTLE}"
                if slurm.release(mine.job_id, when, mine.exclude):
                    return
        time.sleep(pause)
        pause = min(2.0, 1.2 * pause)  # a whole partition may have been preempted
