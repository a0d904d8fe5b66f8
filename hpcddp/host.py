"""What the batch script asks on its host, before and after the ranks: standard library only.

    begin RUN PID [N]    checks and claims the run dir, to follow attempt N; prints one line for the
                         script: attempt, MASTER_ADDR, MASTER_PORT, end of the time limit, run dir
    end RUN N CODE       decides what follows the end of attempt N, and does it; prints the exit
                         code of the job, or `again` where the script itself starts over
    release RUN N NODES  ends the wait of attempt N's job, which was just queued again

It runs from RUN/host.pyz with whatever Python there is, beside a container too, and when the
environment of the job is gone.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import socket
import stat
import sys
import time
from dataclasses import asdict
from pathlib import Path

from hpcddp import comeback, hostlist, ledger, record, requeue, site, slurm
from hpcddp.errors import HpcddpError, RunError, SlurmUnreachable
from hpcddp.ledger import Attempt
from hpcddp.requeue import End, Past, Policy
from hpcddp.rundir import RunDir, last_lines, read_json, write_json

ASK = 4.0  # seconds for one question at the start: a controller that is away must not delay it
LATE = 90.0  # seconds before the time limit: Slurm warns up to a minute early
LOOKS = 3  # at a job that changes while it is decided about
FAILED = 3  # exit code of this program: it ran, and the answer is no


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
        facts.site = asdict(site.read(os.environ.get("SLURM_JOB_PARTITION", ""), ASK))
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


def end(run: RunDir, number: int, code: int) -> str:
    """Decide what follows, write it down, and do it; what the script does then."""
    mine = ledger.owner(run, number)
    if mine is None:
        print(f"hpcddp: a newer attempt works on this run: attempt {number} is over")
        return "1"
    job = record.read(run)
    policy = Policy.of(job.spec.get("requeue", {}))
    took = time.time() - mine.began
    for _ in range(LOOKS):
        found = requeue.decide(gather(run, mine, code), past(run), policy)
        written = ledger.end(run, number, code, found.cause, found.action, found.reason)
        next_ = found.action + (f" ({found.reason})" if found.reason else "")
        print(f"hpcddp: attempt {number} ended after {took:.0f} s: {found.cause}, "
              f"exit code {code}; next: {next_}", flush=True)  # fmt: skip
        if written is None or found.action not in (requeue.AGAIN, requeue.FOLLOW):
            break
        if answer := comeback.bring_back(run, written, found, job):
            return answer
    if found.action == requeue.LEFT:
        comeback.shorten(run, mine)
    well = found.cause in (requeue.DONE, requeue.ASKED) or found.action == requeue.LEFT
    return "0" if well else "1"


def past(run: RunDir) -> list[Past]:
    """What counts of the earlier attempts: those since the run last ended and was resumed."""
    earlier = ledger.attempts(run)[:-1]
    ends = [i for i, attempt in enumerate(earlier) if attempt.action not in requeue.RETURNS]
    since = earlier[ends[-1] + 1 :] if ends else earlier
    return [Past(attempt.cause or "", attempt.progress) for attempt in since]


def gather(run: RunDir, mine: Attempt, code: int) -> End:
    """All that can be known about the end of an attempt."""
    log = comeback.tail(run.attempt(mine.number).log)
    failure = read_json(run.attempt(mine.number).error) or {}
    oom = "oom_kill" in log or "oom-kill" in log or "Out Of Memory" in log
    common = End(
        code,
        state=requeue.LOCAL,
        want=(read_json(run.request) or {}).get("want", ""),
        kind="oom" if oom and code else str(failure.get("kind", "crash") if failure else ""),
        progress=ledger.newest_step(run) > mine.checkpoint,
    )
    if not mine.slurm or code == 0:
        return common
    known = comeback.ask(mine.job_id)
    facts = {**asdict(common), "ending": comeback.said(mine), "state": ""}
    if known:
        facts |= {
            "state": known.state,
            "requeued": known.restarts > mine.restarts,
            "preempted": known.preempted,
        }
    elif facts["ending"]:
        facts["state"] = "COMPLETING"
    facts["grace"] = mine.site.get("grace", 0) > 0
    facts["late"] = _late(run, mine)
    return End(**facts)


def _late(run: RunDir, mine: Attempt) -> bool:
    """Whether the time limit was near: by the clock, or as rank 0 says, which knows its saves."""
    if not mine.deadline:
        return False
    if time.time() > mine.deadline - LATE - record.read(run).lead:
        return True
    lines = last_lines(run.attempt(mine.number).metrics, comeback.TAIL)
    return any(line.get("event") == "end" and line.get("by") == "time limit" for line in lines)


def _deaf() -> None:
    """Slurm's TERM at the end of a job is for others."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(args: list[str]) -> int:
    """Dispatch `begin`, `end` and `release`."""
    verb, *rest = args
    try:
        if verb == "begin":
            print(begin(RunDir(rest[0]), int(rest[1]), int("".join(rest[2:]) or 0)))
        elif verb == "end":
            _deaf()  # a job that is queued again gets TERM at once
            # What is said on the way goes to the log; the answer alone to the script.
            with contextlib.redirect_stdout(sys.stderr):
                answer = end(RunDir(rest[0]), int(rest[1]), int(rest[2]))
            print(answer)
        else:
            comeback.release(RunDir(rest[0]), int(rest[1]), rest[2])
    except (HpcddpError, OSError) as error:
        print(f"hpcddp: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
