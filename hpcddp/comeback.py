"""Step 12, the act: bring a run back, from its batch script (standard library only).

The very job is queued again where that is quick; else a follow-up job goes on in the same run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from hpcddp import ledger, reason, requeue, slurm
from hpcddp.errors import RunError, SlurmUnreachable, SubmissionRefused
from hpcddp.ledger import Attempt
from hpcddp.record import JobRecord
from hpcddp.requeue import Decision
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.site import Site

PATIENCE = 100.0  # seconds for which a controller that is away is asked again
PAUSE = 3.0  # seconds between two such questions
HOLD = 60.0  # seconds for which a job that was queued again is looked for
TAIL = 1 << 16  # bytes of a log that are searched
SETTLE = 4  # seconds from the end of one life to the next: clocks of nodes differ a little


def ask(job_id: str) -> slurm.JobFacts | None:
    """What Slurm says of the job, waiting for a controller that is away; None if nobody answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return slurm.facts(job_id)
        except SlurmUnreachable as error:
            if time.monotonic() > deadline or not can_ask():
                return None
            print(f"hpcddp: {error.what}: asking again", flush=True)
            time.sleep(PAUSE)


def can_ask() -> bool:
    """Whether there is a program at all that could answer later."""
    return any(os.access(Path(p, name), os.X_OK) for p in os.get_exec_path()
               for name in ("scontrol", "squeue", "sbatch"))  # fmt: skip


def bring_back(run: RunDir, mine: Attempt, found: Decision, job: JobRecord) -> str:
    """Bring the run back, by the first way that works; what the script does then. Empty if Slurm
    has begun to end the job, so that the decision is to be made again."""
    if not mine.slurm:
        return "again"
    exclude = excluded(run, job)
    ways = [follow] if found.action == requeue.FOLLOW else [back, follow]
    if found.action == requeue.AGAIN and prefers_follow(mine):
        ways.reverse()
    deadline, refused = time.monotonic() + PATIENCE, ""
    while time.monotonic() < deadline:
        for way in ways:
            try:
                way(run, mine, exclude, found)
                return "0"
            except RunError as error:
                print(f"hpcddp: {error.what}", flush=True)
                return ""
            except (SlurmUnreachable, SubmissionRefused) as error:
                refused = error.what
            print(f"hpcddp: {way.__name__}: {refused}", flush=True)
        if not can_ask():
            break
        time.sleep(PAUSE)
    reason = f"could not be queued again ({refused}); hpcddp resume {run.name} goes on"
    ledger.end(run, mine.number, mine.exit_code or 0, found.cause, requeue.NONE, reason)
    return "1"


def prefers_follow(mine: Attempt) -> bool:
    """Where cgroups track processes nobody can end a requeued job's wait: a follow-up has none.

    An array's element comes back as itself all the same: a follow-up would leave its array.
    """
    rules = Site(**mine.site) if mine.site else Site(tracking="linuxproc")
    return not rules.outlives and rules.hold > 10 and "_" not in mine.job_id


def back(run: RunDir, mine: Attempt, exclude: str, found: Decision) -> None:
    """Queue this very job again. Only while Slurm says that it runs.

    Raises:
        RunError: Slurm ends the job.
        SlurmUnreachable, SubmissionRefused: Slurm did not queue it.
    """
    known = slurm.facts(mine.job_id)
    again = known is not None and known.restarts > mine.restarts
    if known and not known.running and not again:
        raise RunError(f"the job is {known.state} now")
    helper = shorten(run, mine, exclude)  # there before Slurm ends this script
    if again:
        return
    if refused := slurm.requeue(mine.job_id):
        helper.kill()
        helper.wait()
        raise SubmissionRefused(refused)


def shorten(run: RunDir, mine: Attempt, exclude: str = "") -> subprocess.Popen[bytes]:
    """Start what ends the job's wait; it outlives this job where Slurm lets it."""
    verb = ["release", str(run.path), str(mine.number), exclude]
    command = [sys.executable, "-I", sys.argv[0], *verb]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def follow(run: RunDir, mine: Attempt, exclude: str, found: Decision) -> None:
    """Submit the script as a new job that goes on when this one has left."""
    after = found.action == requeue.AGAIN
    facts = ledger.owner(run, mine.number) or mine
    facts.successor = slurm.successor(
        run.script, mine.number, mine.job_id, exclude=exclude, after=after
    )
    write_json(run.attempt(mine.number).facts, asdict(facts))
    print(f"hpcddp: job {facts.successor} goes on", flush=True)


def excluded(run: RunDir, job: JobRecord) -> str:
    """The nodes that the next attempt is to leave out, as Slurm takes them: what the job says, and
    those that failed since there was progress. Empty if only the job's own count."""
    if not job.spec.get("requeue", {}).get("exclude_bad_nodes"):
        return ""
    bad: list[str] = []
    for attempt in reversed(ledger.attempts(run)):
        bad += [host for host in [bad_host(run, attempt)] if host and host not in bad]
        if attempt.progress:
            break
    own = str(job.spec.get("slurm", {}).get("exclude", ""))
    return ",".join([*([own] if own else []), *bad]) if bad else ""


def bad_host(run: RunDir, mine: Attempt) -> str:
    """The node that an attempt's failure points to, if there is one; or the nodes that failed."""
    failure = read_json(run.attempt(mine.number).error) or {}
    if failure and failure.get("kind") != "peer":
        return str(failure["host"])
    first = reason.failed(run, mine.number)
    return first.host if first else ""


def said(attempt: Attempt) -> str:
    """Why Slurm ended an attempt's job, in its own words: a cause, or ""."""
    log = tail(Path(attempt.said), attempt.said_size) if attempt.said else ""
    return requeue.ending(log)


def tail(path: Path, start: int = 0) -> str:
    """The end of a file, of what comes after `start` bytes."""
    with contextlib.suppress(OSError), path.open("rb") as f:
        f.seek(max(start, f.seek(0, os.SEEK_END) - TAIL))
        return f.read().decode("utf-8", "replace")
    return ""


def release(run: RunDir, number: int, exclude: str) -> None:
    """Shorten the wait of a job that was queued again: Slurm holds it for two minutes.

    The hold is there because a node refuses a credential that is not younger than the end of the
    job's last life, which it knows to the second. So the next life begins SETTLE seconds after all
    nodes have let go. While they have not, the wait cannot be changed. A job that somebody
    cancelled meanwhile stays cancelled; one that was cancelled in the instant before it was queued
    again is cancelled again.
    """
    mine = ledger.read(run.attempt(number))
    if mine is None:
        return
    pause, deadline = 0.3, time.monotonic() + HOLD
    while time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnreachable):
            known = slurm.facts(mine.job_id)
            if known is None or not (known.running or known.state in ("COMPLETING", "PENDING")):
                return
            if known.state == "PENDING":
                if said(mine) == requeue.CANCELLED:
                    slurm.cancel(mine.job_id)
                    return
                if slurm.release(mine.job_id, f"now+{SETTLE}", exclude):
                    return
        time.sleep(pause)
        pause = min(2.0, 1.2 * pause)  # a whole partition may have been preempted
