"""Step 12, the act: bring a run back, from its batch script (standard library only).

The very job is queued again where that is quick; else a follow-up job goes on in the same run. A
request that got no answer may have been carried out all the same: what became of it is asked before
anything else is tried. Where both ways were taken, the life of the very job cancels its follow-up.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hpcddp.attempt import decision, first_failure, ledger, log_reader
from hpcddp.attempt.decision import Decision, Past
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import HpcddpError, RunError, SlurmMissing, SlurmUnreachable, SubmissionRefused
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import hostlist
from hpcddp.slurm.rules import Site

PATIENCE = 3600.0  # seconds for which a controller that is away is asked again
LONGEST, LEAST = 60.0, 3.0  # seconds to wait for one answer
TRIES = 3  # of one way of coming back that gets no answer
PAUSE = 3.0  # seconds between two such questions
HOLD = 900.0  # seconds for which a job that was queued again is looked for
LOOK = "look"  # a follow-up's second argument: its parent has not decided that there is to be one
SETTLE = 4  # seconds from the end of one life to the next: clocks of nodes differ a little


def patience(mine: Attempt, *, ends: bool) -> float:
    """Seconds to wait for an answer of Slurm: while the job lives, and LONGEST at most.

    Args:
        ends: Slurm has begun to end the job, or has announced it.
    """
    rules = Site(**mine.site) if mine.site else Site()
    left = rules.notice if ends else (mine.deadline or math.inf) - time.time() + rules.kill_wait
    return min(LONGEST, max(LEAST, left))


def ask(mine: Attempt) -> slurm.JobInfo | None:
    """What Slurm says of the job, waiting for a controller that is away; None without an answer."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return slurm.facts(mine.job_id, patience(mine, ends=False))
        except SlurmUnreachable as error:
            if time.monotonic() > deadline or not can_ask():
                return None
            print(f"hpcddp: {error.what}: asking again", flush=True)
            time.sleep(PAUSE)


def can_ask() -> bool:
    """Whether there is a program at all that could answer later."""
    return any(os.access(Path(p, name), os.X_OK) for p in os.get_exec_path()
               for name in ("scontrol", "squeue", "sbatch"))  # fmt: skip


def bring_back(run: RunDir, mine: Attempt, verdict: Decision, job: JobRecord) -> str:
    """Bring the run back, by the first way that works; what the script does then. Empty if Slurm
    has begun to end the job, so that the decision is to be made again."""
    if not mine.slurm:
        return "again"
    mine.exclude = excluded(run, job)
    if mine.exclude:
        note(run, mine)
    ways = [follow] if verdict.action == decision.FOLLOW else [back, follow]
    if verdict.action == decision.AGAIN and prefers_follow(mine):
        ways.reverse()
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
            print(f"hpcddp: {way.__name__}: {refused}", flush=True)
            if isinstance(failed, SlurmUnreachable) and not isinstance(failed, SlurmMissing):
                tries += 1
                if tries % TRIES:  # ask by the same way what became of the request
                    break
                if _is_back(mine):
                    return "0"
        if not can_ask():
            break
        time.sleep(PAUSE)
    reason = f"could not be queued again ({refused}); hpcddp resume {run.name} goes on"
    ledger.end(run, mine.number, mine.exit_code or 0, verdict.cause, decision.NONE, reason)
    return "1"


def _is_back(mine: Attempt) -> bool:
    """Whether Slurm has queued the job again, as far as it answers."""
    with contextlib.suppress(SlurmUnreachable):
        known = slurm.facts(mine.job_id, patience(mine, ends=False))
        return bool(known and known.restarts > mine.restarts)
    return False


def prefers_follow(mine: Attempt) -> bool:
    """Where cgroups track processes no process is left to end a requeued job's wait: a follow-up
    has none.

    An array's element comes back as itself all the same: a follow-up would leave its array.
    """
    rules = Site(**mine.site) if mine.site else Site(tracking="linuxproc")
    return not rules.outlives and rules.hold > 10 and "_" not in mine.job_id


def back(run: RunDir, mine: Attempt, verdict: Decision, job: JobRecord) -> None:
    """Queue this very job again. Only while Slurm says that it runs.

    The sentry, which outlives this job where Slurm lets it, ends the wait.

    Raises:
        RunError: Slurm ends the job.
        SlurmUnreachable: it is not known whether Slurm has queued it.
        SubmissionRefused: Slurm did not queue it.
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
    """Submit the script as a new job that goes on when this one has left.

    Raises:
        SlurmUnreachable: it is not known whether it waits.
        SubmissionRefused: Slurm did not take it.
    """
    ok = verdict.action == decision.AGAIN
    wait = patience(mine, ends=not ok)
    mine.successor = follow_up(run, mine, job.name, [str(mine.number)], ok=ok, wait=wait)
    note(run, mine)
    print(f"hpcddp: job {mine.successor} goes on", flush=True)


def follow_up(
    run: RunDir, mine: Attempt, name: str, arguments: Sequence[str], *, ok: bool, wait: float
) -> str:
    """The job that follows an attempt: one that waits already, since an answer may have been lost,
    or a new one. ``slurm.successor`` says what is raised."""
    with contextlib.suppress(SlurmMissing):
        for job_id, number in slurm.follow_ups(run.script, name, wait).items():
            if number == mine.number:
                return job_id
    return slurm.successor(
        run.script, arguments, mine.job_id, ok=ok, exclude=mine.exclude, timeout=wait
    )


def drop(run: RunDir, name: str, *, upto: int, but: str, wait: float = slurm.TIMEOUT) -> None:
    """Cancel the jobs that wait to follow an attempt, up to one of this number.

    Args:
        but: the job that asks: it may be such a one itself.

    Raises:
        SlurmUnreachable: it is not known whether there are any.
    """
    for job_id, number in slurm.follow_ups(run.script, name, wait).items():
        if number <= upto and job_id != but:
            slurm.cancel(job_id, state="PENDING", timeout=wait)


def note(run: RunDir, facts: Attempt) -> None:
    """Write an attempt's facts down; a full disk, which may have room again soon, ends nothing."""
    try:
        write_json(run.attempt(facts.number).facts, asdict(facts))
    except OSError as error:
        print(f"hpcddp: not written down: {error}", flush=True)


def past(run: RunDir) -> list[Past]:
    """What counts of the earlier attempts: those since the run last ended and was resumed."""
    earlier = ledger.attempts(run)[:-1]
    ends = [i for i, attempt in enumerate(earlier) if attempt.action not in decision.RETURNS]
    since = earlier[ends[-1] + 1 :] if ends else earlier
    return [Past(attempt.cause or "", attempt.progress) for attempt in since]


def excluded(run: RunDir, job: JobRecord) -> str:
    """The nodes that the next attempt is to leave out, as Slurm takes them: what the job says, and
    those that failed since there was progress. Empty if only the job's own count.

    Never so many that too few are left: then the oldest of them may be used again.
    """
    asked = bool(job.spec.get("requeue", {}).get("exclude_bad_nodes"))
    bad: list[str] = []
    for attempt in reversed(ledger.attempts(run)):
        host = bad_host(run, attempt, job, certain=not asked)
        bad += [name for name in [host] if name and name not in bad]
        if attempt.progress:
            break
    own = str(job.spec.get("slurm", {}).get("exclude", ""))
    bad = _spare(run, bad, own, job) if bad else []
    return ",".join([*([own] if own else []), *bad]) if bad else ""


def _spare(run: RunDir, bad: list[str], own: str, job: JobRecord) -> list[str]:
    """Of some host lists, newest first, those without which the job can still start."""
    partition = str(job.spec.get("slurm", {}).get("partition", "")).partition(",")[0]
    try:
        lists = slurm.usable_nodes(partition or os.environ.get("SLURM_JOB_PARTITION", ""))
        usable = {host for hosts in lists for host in hostlist.expand_hosts(hosts)}
        usable -= set(hostlist.expand_hosts(own)) if own else set()
    except HpcddpError as error:
        print(f"hpcddp: no node is left out: {error.what}", flush=True)
        return []
    kept = []
    for hosts in bad:
        left = usable - set(hostlist.expand_hosts(hosts))
        if len(left) >= job.nodes[0]:
            usable = left
            kept.append(hosts)
    with contextlib.suppress(SlurmUnreachable):
        # Others may lack the job's GPUs. What Slurm refuses with these nodes too is another matter.
        while kept and not _taken(run, [own, *kept]) and _taken(run, [own]):
            print(f"hpcddp: {kept[-1]} is used again: too few other nodes suit the job", flush=True)
            kept.pop()
    return kept


def _taken(run: RunDir, left_out: list[str]) -> bool:
    return slurm.takes(run.script, ",".join(filter(None, left_out)), LONGEST / 4)


def bad_host(run: RunDir, mine: Attempt, job: JobRecord, *, certain: bool = False) -> str:
    """The node that an attempt's failure points to, if there is one; or the nodes that failed.

    Args:
        certain: only where the ranks have compared themselves, and found it.
    """
    failure = read_json(run.attempt(mine.number).error) or {}
    if certain:
        return str(failure["host"]) if failure.get("bad_host") else ""
    if failure and failure.get("kind") != "peer":
        return str(failure["host"])
    first = first_failure.failed(run, mine.number, job)
    return first.host if first else ""


def pass_over(run: RunDir, mine: Attempt, upto: tuple[int, int]) -> None:
    """Slurm's words up to here are of a signal for the batch script alone: the job runs on."""
    mine.said_size, mine.node_log_size = upto
    note(run, mine)


def release(mine: Attempt) -> None:
    """Shorten the wait of a job that was queued again: Slurm holds it for two minutes.

    The hold is there because a node refuses a credential that is not younger than the end of the
    job's last life, which it knows to the second. So the next life begins SETTLE seconds after all
    nodes have let go. While they have not, the wait cannot be changed. A job that was cancelled
    meanwhile stays cancelled; one that was cancelled in the instant before it was queued again is
    cancelled again.
    """
    pause, deadline = 0.3, time.monotonic() + HOLD
    while time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnreachable):
            known = slurm.facts(mine.job_id)
            if known is None or not (known.running or known.state in ("COMPLETING", "PENDING")):
                return
            if known.running and known.restarts > mine.restarts:  # its next life
                return
            if known.state == "PENDING":
                if log_reader.ending_of(mine) == decision.CANCELLED:
                    slurm.cancel(mine.job_id)
                    return
                if slurm.release(mine.job_id, f"now+{SETTLE}", mine.exclude):
                    return
        time.sleep(pause)
        pause = min(2.0, 1.2 * pause)  # a whole partition may have been preempted
