"""Step 7: what the batch script asks before the ranks: is the run dir mine? (standard library only)

One job at a time works in a run dir. A life claims it, and leaves where it is not needed, where a
person asked it to end, or where another job works or is to come back.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import socket
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path

from hpcddp import comeback, hostlist, ledger, record, requeue, site, slurm
from hpcddp.errors import RunError, SlurmUnreachable
from hpcddp.ledger import Attempt
from hpcddp.rundir import RunDir, read_json, write_json

ASK = 4.0  # seconds for one question at the start: a controller that is away must not delay it


def check_owner(run: RunDir) -> None:
    """Refuse a run dir that somebody else owns or can write to: its pickle would be his code."""
    paths = [run.path, run.job, run.host, *run.submitit.glob("*.pkl")]
    for path in (run.submitit, *paths):
        if not path.exists():
            continue
        facts = path.stat()
        if facts.st_uid != os.geteuid() or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RunError(
                "belongs to somebody else, or others can write to it",
                where=str(path),
                hint="nothing of it is run; make it yours alone: chmod go-w",
            )


def works(attempt: Attempt, run: RunDir, me: Attempt) -> bool:
    """Whether an attempt that has not ended is still at work, as far as can be told from here."""
    if (attempt.slurm, attempt.job_id) == (me.slurm, me.job_id):
        return False  # an earlier life of this very job
    if not attempt.slurm:
        if attempt.host != os.uname().nodename:
            return True
        return ledger.process_start(attempt.pid) == attempt.pid_start != ""
    try:
        row = slurm.job(attempt.job_id, record.read(run).name)
    except SlurmUnreachable:
        return True
    return row is not None and row.live


def free_port() -> int:
    """A port that can be bound now and that the kernel hands to nobody in the meantime."""
    low, high = 32768, 60999
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        low, high = (int(n) for n in text.split())
    except (OSError, ValueError):
        pass
    ports = [p for p in range(15000, 65000) if not low <= p <= high]
    for port in random.SystemRandom().sample(ports, min(200, len(ports))):
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise RunError("no free port for the rendezvous", where=os.uname().nodename)


def my_job() -> str:
    """The id of the surrounding job; of an array's element A_N, since A alone means all of them."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def element(run: RunDir) -> RunDir:
    """The run dir of an array's element: a run of its own beside the script's."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not task:
        return run
    own = RunDir(run.path.with_name(f"{run.name}_{task}"))
    if not own.job.exists():
        with contextlib.suppress(FileExistsError):
            own.path.mkdir(mode=0o700)
        own.attempts.mkdir(exist_ok=True)
        own.host.write_bytes(run.host.read_bytes())
        own.script.write_bytes(_script_of(own, run.script.read_bytes()))
        job = record.read(run)
        job.slurm_name, job.run = job.name, own.name
        record.write(own, job)
    return own


def _script_of(run: RunDir, script: bytes) -> bytes:
    """A script that works in another run dir: a follow-up of an element is in no array."""
    line = b"readonly RUN=" + os.fsencode(shlex.quote(str(run.path)))
    return re.sub(rb"^readonly RUN=.*$", lambda _: line, script, count=1, flags=re.MULTILINE)


def begin(run: RunDir, pid: int, follows: int = 0) -> str:
    """Claim the run dir for this life; empty if a person has asked this job to end.

    Args:
        follows: the attempt that this job was submitted to follow; 0 for none.
    """
    check_owner(run)
    job = record.read(run)
    in_slurm = job.backend == "slurm"
    if in_slurm and "SLURM_JOB_ID" not in os.environ:
        hint = f"sbatch {run.script}"
        raise RunError("this script is for Slurm, and no job is around", where=run.name, hint=hint)
    run = element(run) if in_slurm else run
    facts = here(my_job(), pid) if in_slurm else ledger.life(str(pid), pid)
    if want := asked(run, facts.job_id):
        print(f"hpcddp: {want} was asked before the job began", file=sys.stderr)
        return ""
    if reason := needless(run, facts.job_id, follows):
        print(f"hpcddp: {reason}", file=sys.stderr)
        return ""
    if in_slurm and not follows:
        check_awaited(run, facts.job_id)
    run.request.unlink(missing_ok=True)  # meant for an earlier job
    if not ledger.begin(run, facts, lambda earlier: works(earlier, run, facts), close):
        earlier = ledger.last(run)
        raise RunError(
            f"job {earlier.job_id if earlier else '?'} already works on this run",
            where=str(run.path),
            hint=f"hpcddp cancel {run.name} ends it",
        )
    if in_slurm:
        provide_pickle(run, facts.job_id)
    first = hostlist.first_host(facts.nodes) + job.host_suffix if in_slurm else "127.0.0.1"
    return f"{facts.number} {first} {free_port()} {facts.deadline or 0:.0f} {run.path}"


def needless(run: RunDir, job_id: str, follows: int) -> str:
    """Why a follow-up job has nothing to do: sbatch may have been heard though it gave no answer,
    and the run gone on, or ended, without it."""
    newest = ledger.last(run)
    if not follows or newest is None or newest.job_id == job_id:
        return ""
    if newest.number != follows:
        return f"attempt {follows} was to be followed, and attempt {newest.number} has begun since"
    return "" if newest.action in requeue.RETURNS else f"attempt {follows} is not to be followed"


def check_awaited(run: RunDir, job_id: str) -> None:
    """Refuse a job that takes the place of one that waits to come back."""
    newest = ledger.last(run)
    awaited = (newest.successor or newest.job_id) if newest else job_id
    if not newest or newest.action not in requeue.RETURNS or awaited == job_id:
        return
    with contextlib.suppress(SlurmUnreachable):
        row = slurm.job(awaited, record.read(run).name)
        if row and row.live:
            raise RunError(
                f"job {awaited} waits to come back on this run",
                where=str(run.path),
                hint=f"hpcddp cancel {run.name} ends it",
            )


def asked(run: RunDir, job_id: str) -> str:
    """What a person asked of this job while it waited: stop, cancel, or nothing."""
    request, earlier = read_json(run.request) or {}, ledger.last(run)
    waited = bool(
        earlier and earlier.action in requeue.RETURNS and earlier.job_id == request.get("job_id")
    )
    if request.get("want") not in ("stop", "cancel") or not (
        waited or request.get("job_id") == job_id
    ):
        return ""
    if earlier:
        earlier.cause = requeue.ASKED if request["want"] == "stop" else requeue.CANCELLED
        earlier.action, earlier.reason = requeue.NONE, "asked while it waited"
        write_json(run.attempt(earlier.number).facts, asdict(earlier))
    return str(request["want"])


def here(job_id: str, pid: int) -> Attempt:
    """The facts of a life inside a Slurm job."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", os.uname().nodename)
    facts = ledger.life(job_id, pid, slurm=True, nodes=nodes)
    facts.restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    facts.deadline = float(os.environ.get("SLURM_JOB_END_TIME") or 0) or None
    with contextlib.suppress(OSError):  # the log that Slurm gave to the script
        facts.said = str(Path("/proc/self/fd/2").readlink())
        facts.said_size = os.fstat(2).st_size
    with contextlib.suppress(SlurmUnreachable):
        known = slurm.facts(job_id, ASK)
        if known:
            facts.restarts, facts.deadline = known.restarts, known.end
        facts.site = site.read(os.environ.get("SLURM_JOB_PARTITION", ""), ASK)._asdict()
    return facts


def close(earlier: Attempt) -> None:
    """Say how an attempt ended that could not: its script was killed, or its node died."""
    earlier.cause = comeback.said(earlier) or (requeue.NODE if earlier.slurm else requeue.UNKNOWN)
    earlier.action, earlier.ended = requeue.LEFT, time.time()


def provide_pickle(run: RunDir, job_id: str) -> None:
    """Let submitit find its pickle under this job's id.

    It names the file after sbatch has answered. Where that answer was lost, or where somebody
    gave the same script to sbatch again, the file has another name.
    """
    target = run.submitit / f"{job_id}_submitted.pkl"
    pickles = sorted(run.submitit.glob("*.pkl"), key=lambda path: path.stat().st_mtime)
    if pickles:
        with contextlib.suppress(OSError):  # it is there, or submitit renames it at this moment
            os.link(pickles[-1], target)
