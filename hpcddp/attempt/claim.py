"""Step 7: claim the run folder for a new attempt, before its ranks start.

One job at a time works in a run folder. A job that is not needed, that a user has asked to end, or
that finds another job running or waiting for the run, leaves without an attempt.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hpcddp import processes, record
from hpcddp.attempt import decision, end_facts, ledger, rendezvous
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.nodes import bad_nodes, node_events
from hpcddp.attempt.surrounding_job import ASK, check_surroundings, element, job_attempt, my_job
from hpcddp.errors import RunError, SlurmMissing, SlurmUnreachable, TopologyError
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import hostlist

NODE_LOGS = "/tmp/hpcddp-"  # start of the names of our logs on nodes: see plan.py
PATIENCE, PAUSE = 60.0, 3.0  # seconds for a request that needs an answer; between two of them

T = TypeVar("T")


def check_owner(run: RunDir) -> None:
    """Refuse a run folder that others own or can write to: its pickle would be their code."""
    paths = [run.path, run.job, run.host, *run.submitit.glob("*.pkl")]
    for path in (run.submitit, *paths):
        if not path.exists():
            continue
        facts = path.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RunError(
                "owned or writable by another user",
                where=str(path),
                hint="hpcddp runs nothing from it; run `chmod go-w` or `chown`",
            )


def works(attempt: Attempt, run: RunDir, me: Attempt, follows: int) -> bool:
    """Whether an attempt without a recorded end still runs, as far as this host can see."""
    if (attempt.slurm, attempt.job_id) == (me.slurm, me.job_id):
        return False  # an earlier attempt of this job
    if not attempt.slurm:
        if attempt.host != os.uname().nodename:
            return True
        return processes.start_of(attempt.pid) == attempt.pid_start != ""
    if follows == attempt.number:  # Slurm starts this job only after that one
        return False
    row = asked_until(lambda: slurm.job(attempt.job_id, record.read(run).name))
    return row is not None and row.live


def asked_until(question: Callable[[], T]) -> T:
    """Ask Slurm until it answers, for PATIENCE seconds at most.

    Raises:
        SlurmMissing: the program is not installed.
        SlurmUnreachable: there was no answer.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return question()
        except SlurmMissing:
            raise
        except SlurmUnreachable as error:
            if time.monotonic() > deadline:
                raise
            print(f"hpcddp: {error.what}; asking again", file=sys.stderr, flush=True)
            time.sleep(PAUSE)


def begin(
    run: RunDir, pid: int, follows: int = 0, look: bool = False, instead: Sequence[str] = ()
) -> str:
    """Claim the run folder for a new attempt; empty if this job has nothing to do.

    Args:
        follows: the attempt that this job was submitted to follow; 0 for none.
        look: whether that attempt is followed is not decided yet.
        instead: jobs that this one replaces, as they could not reach the run.
    """
    check_owner(run)
    job = record.read(run)
    in_slurm = job.backend == "slurm"
    if in_slurm:
        check_surroundings(run, job)
        run = element(run, check_owner)
    facts = job_attempt(run, my_job(), pid) if in_slurm else ledger.new_attempt(str(pid), pid)
    request = read_json(run.request)
    if want := asked(run, facts.job_id, follows, instead):
        say(run, f"{want} was requested before the job started")
        return ""
    cause = _cause(run, facts, follows)
    if reason := needless(run, facts, follows, look, cause):
        say(run, reason)
        return ""
    if in_slurm and not follows:
        check_awaited(run, facts.job_id)
    check_awaiting(run)
    if not _take(run, facts, follows, cause):
        return refused(run, facts)
    forget(run, request)
    if in_slurm:
        provide_pickle(run, facts.job_id)
    first = hostlist.first_host(facts.nodes) + job.host_suffix if in_slurm else "127.0.0.1"
    return f"{facts.number} {first} {rendezvous.free_port()} {facts.deadline or 0:.0f} {run.path}"


def _take(run: RunDir, facts: Attempt, follows: int, cause: str) -> bool:
    """Take the next attempt number; false if an earlier attempt still runs.

    Args:
        cause: why the last attempt ended, if it did not record that.
    """

    def at_work(earlier: Attempt) -> bool:
        still = works(earlier, run, facts, follows)
        check_awaiting(run)
        return still

    attempt = ledger.begin(run, facts, at_work, lambda earlier: close(run, earlier, facts, cause))
    return attempt is not None


def say(run: RunDir, text: str) -> None:
    """Print why this job leaves, into the run's log too: the node's file is hard to reach."""
    print(f"hpcddp: {text}", file=sys.stderr, flush=True)
    if not my_job():
        return
    with contextlib.suppress(OSError):
        own = Path("/proc/self/fd/2").readlink()
        if not own.is_relative_to(run.path):
            with run.job_log(my_job()).open("a", encoding="utf-8") as log:
                log.write(f"hpcddp: {text}\n")
        if str(own).startswith(NODE_LOGS):
            own.unlink()


def clear(mine: Attempt) -> None:
    """Remove our log on the node. What Slurm writes there from now on is not needed."""
    if mine.node_log.startswith(NODE_LOGS):  # else it is the user's
        with contextlib.suppress(OSError):
            Path(mine.node_log).unlink()


def check_awaiting(run: RunDir) -> None:
    """Refuse if the script has given up this process, which a disk has blocked for too long."""
    look = select.poll()
    look.register(1, 0)
    piped = stat.S_ISFIFO(os.fstat(1).st_mode)
    if piped and any(event & select.POLLERR for _, event in look.poll(0)):
        raise RunError("the batch script no longer waits for this process", where=str(run.path))


def refused(run: RunDir, me: Attempt) -> str:
    """Leave a run in which another job runs; empty if that one replaced this job.

    Raises:
        RunError: this job is none of the run's.
    """
    earlier = ledger.last(run)
    by = earlier.job_id if earlier else "?"
    if any(attempt.job_id == me.job_id for attempt in ledger.attempts(run)):
        say(run, f"job {by} continues this run")
        return ""
    raise RunError(
        f"job {by} is already running this run",
        where=str(run.path),
        hint=f"`hpcddp cancel {run.name}` ends it",
    )


def forget(run: RunDir, request: dict[str, Any] | None) -> None:
    """Remove a request for an earlier job; a newer request stays."""
    with contextlib.suppress(OSError, RunError):
        if request is not None and read_json(run.request) == request:
            run.request.unlink()


def _cause(run: RunDir, me: Attempt, follows: int) -> str:
    """Why the attempt ended that this job follows, if it could not record that."""
    newest = ledger.last(run)
    if not newest or newest.number != follows or newest.cause or newest.job_id == me.job_id:
        return ""
    return asked_until(lambda: end_facts.why_ended(run, newest))


def needless(run: RunDir, me: Attempt, follows: int, look: bool, cause: str = "") -> str:
    """Why a follow-up job has nothing to do: the run may have continued or ended without it. What
    the last attempt could not decide is decided here.

    Args:
        cause: why that one ended, if it did not record that.
    """
    newest = ledger.last(run)
    if not follows or newest is None or newest.job_id == me.job_id:
        return ""
    if newest.number != follows:
        return f"attempt {follows} needs no follow-up job: attempt {newest.number} has started"
    cause = newest.cause or cause
    ends = newest.action not in decision.RETURNS if newest.cause else cause not in decision.FOLLOWED
    if ends and (newest.cause or look or cause == decision.CANCELLED):
        return f"attempt {follows} needs no follow-up job: {cause or 'unknown cause'}"
    with contextlib.suppress(SlurmMissing):
        known = asked_until(lambda: slurm.facts(newest.job_id))
        if known and known.state in ("PENDING", "RUNNING", "CONFIGURING", "SUSPENDED"):
            return f"job {newest.job_id} was requeued and continues"
        # Where the script's node was lost, and Slurm refused the requeue, we have cancelled it.
        ours = (newest.cause, newest.action) == (decision.NODE, decision.FOLLOW)
        if known and known.state.startswith("CANCELLED") and not ours:
            return f"job {newest.job_id} was cancelled while it waited"
    return ""


def check_awaited(run: RunDir, job_id: str) -> None:
    """Refuse a job while another one waits to continue the run. If the followed job itself was
    requeued, it continues, and its sentry cancels the other one."""
    newest = ledger.last(run)
    if not newest or newest.action not in decision.RETURNS or newest.job_id == job_id:
        return
    awaited = newest.successor or newest.job_id
    if awaited == job_id:
        return
    with contextlib.suppress(SlurmMissing):
        name = record.read(run).name
        row = asked_until(lambda: slurm.job(awaited, name))
        if row and row.live:
            raise RunError(
                f"job {awaited} waits to continue this run",
                where=str(run.path),
                hint=f"`hpcddp cancel {run.name}` ends it",
            )


def asked(run: RunDir, job_id: str, follows: int, instead: Sequence[str] = ()) -> str:
    """The user's request for this job while it waited: stop, cancel, or "". ``begin`` explains the
    arguments."""
    request, earlier = read_json(run.request) or {}, ledger.last(run)
    chain = {earlier.job_id, earlier.successor} if earlier else set()
    mine = {job_id, *instead, *(chain if follows or job_id in chain else ())}
    waited = bool(earlier and (earlier.live or earlier.action in decision.RETURNS))
    if request.get("want") not in ("stop", "cancel") or request.get("job_id") not in mine:
        return ""
    if earlier and not waited and request["job_id"] not in (job_id, *instead):
        return ""
    if earlier and waited:
        earlier.cause = decision.ASKED if request["want"] == "stop" else decision.CANCELLED
        earlier.action, earlier.reason = decision.NONE, "requested while it waited"
        write_json(run.attempt(earlier.number).facts, asdict(earlier))
    return str(request["want"])


def close(run: RunDir, earlier: Attempt, mine: Attempt, cause: str = "") -> None:
    """Record the end of an attempt whose script was killed, whose node failed, or which could not
    record it. A failure counts against the node only if Slurm knows of one.

    Args:
        mine: the attempt that begins: in the same allocation, the earlier one was to restart here.
        cause: of the end, if known.
    """
    if earlier.slurm and earlier.allocation == mine.allocation:
        earlier.cause, earlier.action, earlier.ended = decision.CRASH, decision.HERE, time.time()
        return
    with contextlib.suppress(SlurmUnreachable, TopologyError):
        cause = cause or end_facts.why_ended(run, earlier, ASK)
        first = hostlist.first_host(earlier.nodes) if earlier.slurm and not cause else ""
        if first and bad_nodes.is_down(first, ASK):
            cause = decision.NODE
    earlier.cause = cause or (decision.NODE if earlier.slurm else decision.UNKNOWN)
    earlier.action, earlier.ended = decision.LEFT, time.time()
    node_events.record_end(run, earlier, cause)


def provide_pickle(run: RunDir, job_id: str) -> None:
    """Let submitit find its pickle under this job's id.

    It names the file after sbatch's answer. If that was lost, or the script was submitted again,
    the file has another name.
    """
    target = run.submitit / f"{job_id}_submitted.pkl"
    pickles = sorted(run.submitit.glob("*.pkl"), key=lambda path: path.stat().st_mtime)
    if pickles:
        with contextlib.suppress(OSError):  # it exists, or submitit is renaming it
            os.link(pickles[-1], target)
