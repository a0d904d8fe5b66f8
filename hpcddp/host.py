"""What the batch script runs on the host, before and after the ranks: standard library only.

python -P -m hpcddp.host begin RUN PID    checks and claims the run dir; prints the attempt
                                          number, MASTER_ADDR and MASTER_PORT on one line
python -P -m hpcddp.host end RUN N CODE   writes how attempt N ended; exits with the job's code
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
import sys
import time
from pathlib import Path

from hpcddp import hostlist, ledger, record, slurm
from hpcddp.errors import HpcddpError, RunError, SlurmUnreachable
from hpcddp.rundir import RunDir, read_json

STOPPED = 85  # how ranks leave after a stop: it never leaves the batch script


def check_owner(run: RunDir) -> None:
    """Refuse a run dir that somebody else owns or can write to: its pickle would be his code."""
    paths = [run.path, run.job, *run.submitit.glob("*.pkl")]
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


def works(attempt: ledger.Attempt, run: RunDir) -> bool:
    """Whether an attempt that has not ended is still at work, as far as can be told from here."""
    if not attempt.slurm:
        if attempt.host != os.uname().nodename:
            return True
        return ledger.process_start(attempt.pid) == attempt.pid_start != ""
    if attempt.job_id == os.environ.get("SLURM_JOB_ID"):
        return False  # an earlier life of this very job
    try:
        row = slurm.job(attempt.job_id, run.name)
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


def begin(run: RunDir, pid: int) -> str:
    """Claim the run dir for this life; empty if a person has asked this job to end."""
    check_owner(run)
    job = record.read(run)
    in_slurm = job.backend == "slurm"
    if in_slurm and "SLURM_JOB_ID" not in os.environ:
        hint = f"sbatch {run.script}"
        raise RunError("this script is for Slurm, and no job is around", where=run.name, hint=hint)
    job_id = os.environ["SLURM_JOB_ID"] if in_slurm else str(pid)
    request = read_json(run.request)
    if request and request.get("job_id") == job_id:
        print(f"hpcddp: {request['want']} was asked before the job began", file=sys.stderr)
        return ""
    run.request.unlink(missing_ok=True)  # meant for an earlier job
    nodes = os.environ.get("SLURM_JOB_NODELIST", os.uname().nodename) if in_slurm else ""
    facts = ledger.life(job_id, pid, slurm=in_slurm, nodes=nodes)
    if not ledger.begin(run, facts, lambda earlier: works(earlier, run)):
        earlier = ledger.last(run)
        raise RunError(
            f"job {earlier.job_id if earlier else '?'} already works on this run",
            where=str(run.path),
            hint=f"hpcddp cancel {run.name} ends it",
        )
    if in_slurm:
        provide_pickle(run, job_id)
    first = hostlist.first_host(nodes) + job.host_suffix if in_slurm else "127.0.0.1"
    return f"{facts.number} {first} {free_port()}"


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


def end(run: RunDir, number: int, code: int) -> int:
    """Write how the attempt ended; the job's exit code."""
    outcome = how(run, code)
    facts = ledger.end(run, number, code, outcome)
    took = time.time() - facts.began if facts else 0.0
    print(f"hpcddp: attempt {number} ended: {outcome} (exit code {code}) after {took:.0f} s")
    if outcome in (ledger.DONE, ledger.STOPPED):
        return 0
    return 1 if code == STOPPED else code


def how(run: RunDir, code: int) -> str:
    """What the ranks' exit code, a person's request and Slurm say about the end."""
    if code == 0:
        return ledger.DONE
    want = (read_json(run.request) or {}).get("want")
    if want == "cancel":
        return ledger.CANCELLED
    if want == "stop" and code == STOPPED:
        return ledger.STOPPED
    cause = ""
    if "SLURM_JOB_ID" in os.environ:
        with contextlib.suppress(SlurmUnreachable):
            restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
            cause = slurm.ending(os.environ["SLURM_JOB_ID"], restarts)
    return cause or (ledger.STOPPED if code == STOPPED else ledger.FAILED)


def main(args: list[str]) -> int:
    """Dispatch `begin` and `end`."""
    try:
        run = RunDir(args[1])
        if args[0] == "begin":
            print(begin(run, int(args[2])))
            return 0
        return end(run, int(args[2]), int(args[3]))
    except HpcddpError as error:
        print(f"hpcddp: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
