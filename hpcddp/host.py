"""What the batch script asks on its host, before and after the ranks: standard library only.

    begin RUN PID        checks and claims the run dir; prints one line for the script: attempt,
                         MASTER_ADDR, MASTER_PORT, end of the time limit, run dir
    end RUN N CODE       decides what follows the end of attempt N, and does it; prints the exit
                         code of the job, or `again` where the script itself starts over
    release JOB EXCLUDE  ends the wait of a job that was just queued again

It runs from RUN/host.pyz with whatever Python there is, beside a container too, and when the
environment of the job is gone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from hpcddp import hostlist, ledger, record, requeue, site, slurm
from hpcddp.errors import HpcddpError, RunError, SlurmUnreachable, SubmissionRefused
from hpcddp.ledger import Attempt
from hpcddp.record import JobRecord
from hpcddp.requeue import Decision, End, Past, Policy
from hpcddp.rundir import RunDir, last_lines, read_json, write_json
from hpcddp.site import Site

ASK = 4.0  # seconds for one question at the start: a controller that is away must not delay it
PATIENCE = 100.0  # seconds that the end waits for a controller that is away
PAUSE = 3.0  # seconds between two such questions
HOLD = 60.0  # seconds for which a job that was queued again is looked for
SETTLE = 4  # seconds from the end of one life to the next: clocks of nodes differ a little
LATE = 90.0  # seconds before the time limit: Slurm warns up to a minute early
TAIL = 1 << 16  # bytes of a log that are searched
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
        for name in ("host", "script"):
            target = getattr(own, name)
            if not target.exists():
                target.write_bytes(getattr(run, name).read_bytes())
        job = record.read(run)
        job.slurm_name, job.run = job.name, own.name
        record.write(own, job)
    return own


def begin(run: RunDir, pid: int) -> str:
    """Claim the run dir for this life; empty if a person has asked this job to end."""
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
    earlier.cause = said(earlier) or (requeue.NODE if earlier.slurm else requeue.UNKNOWN)
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
    past = [Past(a.cause or "", a.progress) for a in ledger.attempts(run)[:-1]]
    facts = gather(run, mine, code)
    found = requeue.decide(facts, past, policy)
    ledger.end(run, number, code, found.cause, found.action, found.reason)
    took, why = time.time() - mine.began, f" ({found.reason})" if found.reason else ""
    print(f"hpcddp: attempt {number} ended after {took:.0f} s: {found.cause}, exit code {code}; "
          f"next: {found.action}{why}", flush=True)  # fmt: skip
    if found.action in (requeue.AGAIN, requeue.FOLLOW):
        return act(run, mine, found, job)
    if found.cause in (requeue.DONE, requeue.ASKED) or found.action == requeue.LEFT:
        return "0"
    return "1" if code in (0, requeue.STOPPED) else str(code)


def gather(run: RunDir, mine: Attempt, code: int) -> End:
    """All that can be known about the end of an attempt."""
    log = _tail(run.attempt(mine.number).log)
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
    known = ask(mine.job_id)
    facts = {**asdict(common), "ending": said(mine), "state": ""}
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
    lines = last_lines(run.attempt(mine.number).metrics, TAIL)
    return any(line.get("event") == "end" and line.get("by") == "time limit" for line in lines)


def ask(job_id: str) -> slurm.JobFacts | None:
    """What Slurm says of the job, waiting for a controller that is away; None if nobody answers."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return slurm.facts(job_id)
        except SlurmUnreachable as error:
            if time.monotonic() > deadline or not _can_ask():
                return None
            print(f"hpcddp: {error.what}: asking again", flush=True)
            time.sleep(PAUSE)


def _can_ask() -> bool:
    """Whether there is a program at all that could answer later."""
    return any(os.access(Path(p, name), os.X_OK) for p in os.get_exec_path()
               for name in ("scontrol", "squeue", "sbatch"))  # fmt: skip


def act(run: RunDir, mine: Attempt, found: Decision, job: JobRecord) -> str:
    """Bring the run back, by the first way that works; what the script does then."""
    if not mine.slurm:
        return "again"
    exclude = bad_host(run, mine) if job.spec.get("requeue", {}).get("exclude_bad_nodes") else ""
    ways = [follow] if found.action == requeue.FOLLOW else [back, follow]
    if found.action == requeue.AGAIN and prefers_follow(mine):
        ways.reverse()
    deadline, refused = time.monotonic() + PATIENCE, ""
    while time.monotonic() < deadline:
        for way in ways:
            try:
                way(run, mine, exclude, found)
                return "0"
            except RunError as error:  # it has been ended meanwhile
                ledger.end(run, mine.number, mine.exit_code or 1, requeue.CANCELLED, requeue.NONE)
                print(f"hpcddp: {error.what}", flush=True)
                return "1"
            except (SlurmUnreachable, SubmissionRefused) as error:
                refused = error.what
            print(f"hpcddp: {way.__name__}: {refused}", flush=True)
        if not _can_ask():
            break
        time.sleep(PAUSE)
    reason = f"could not be queued again ({refused}); hpcddp resume {run.name} goes on"
    ledger.end(run, mine.number, mine.exit_code or 1, found.cause, requeue.NONE, reason)
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
        RunError: somebody has ended the job.
        SlurmUnreachable, SubmissionRefused: Slurm did not queue it.
    """
    known = slurm.facts(mine.job_id)
    if known and known.restarts > mine.restarts:
        return
    if known and not known.running:
        raise RunError(f"the job is {known.state}: somebody ended it")
    # It waits for the end of this job, and must be there before Slurm ends it.
    command = [sys.executable, "-I", sys.argv[0], "release", mine.job_id, exclude or "-"]
    helper = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    if refused := slurm.requeue(mine.job_id):
        helper.kill()
        helper.wait()
        raise SubmissionRefused(refused)


def _deaf() -> None:
    """Slurm's TERM at the end of a job is for others."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def follow(run: RunDir, mine: Attempt, exclude: str, found: Decision) -> None:
    """Submit the script as a new job that goes on when this one has left."""
    after = found.action == requeue.AGAIN
    facts = ledger.owner(run, mine.number) or mine
    facts.successor = slurm.successor(run.script, mine.job_id, exclude=exclude, after=after)
    write_json(run.attempt(mine.number).facts, asdict(facts))
    print(f"hpcddp: job {facts.successor} goes on", flush=True)


def bad_host(run: RunDir, mine: Attempt) -> str:
    """The host that an attempt's failure points to, if there is one."""
    failure = read_json(run.attempt(mine.number).error) or {}
    return str(failure.get("suspect") or failure.get("host") or "")


def release(job_id: str, exclude: str) -> None:
    """Shorten the wait of a job that was queued again: Slurm holds it for two minutes.

    The hold is there because a node refuses a credential that is not younger than the end of the
    job's last life, which it knows to the second. So the next life begins SETTLE seconds after all
    nodes have let go. While they have not, the wait cannot be changed. A job that somebody
    cancelled meanwhile stays cancelled: nothing here brings one back.
    """
    deadline = time.monotonic() + HOLD
    while time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnreachable):
            known = slurm.facts(job_id)
            if known is None or known.state not in ("RUNNING", "COMPLETING", "PENDING"):
                return
            if known.state == "PENDING":
                slurm.release(job_id, f"now+{SETTLE}", exclude)
                return
        time.sleep(0.3)


def said(attempt: Attempt) -> str:
    """Why Slurm ended an attempt's job, in its own words: a cause, or ""."""
    log = _tail(Path(attempt.said), attempt.said_size) if attempt.said else ""
    return requeue.ending(log)


def _tail(path: Path, start: int = 0) -> str:
    """The end of a file, of what comes after `start` bytes."""
    with contextlib.suppress(OSError), path.open("rb") as f:
        f.seek(max(start, f.seek(0, os.SEEK_END) - TAIL))
        return f.read().decode("utf-8", "replace")
    return ""


def main(args: list[str]) -> int:
    """Dispatch `begin`, `end` and `release`."""
    verb, *rest = args
    try:
        if verb == "begin":
            print(begin(RunDir(rest[0]), int(rest[1])))
        elif verb == "end":
            _deaf()  # a job that is queued again gets TERM at once
            # What is said on the way goes to the log; the answer alone to the script.
            with contextlib.redirect_stdout(sys.stderr):
                answer = end(RunDir(rest[0]), int(rest[1]), int(rest[2]))
            print(answer)
        else:
            release(rest[0], rest[1].strip("-"))
    except (HpcddpError, OSError) as error:
        print(f"hpcddp: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
