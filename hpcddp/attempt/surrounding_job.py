"""Step 7, the facts: the Slurm job of a batch script that starts an attempt."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcddp import record
from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import RunError, RunUnreadable, SlurmUnreachable
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import rules

# Seconds for one request: a controller that does not answer must not delay the start. The sentry
# asks again.
ASK = 4.0
# Facts of an attempt that hold for the next one in the same allocation.
KEPT = ("said", "said_size", "said_id", "node_log", "node_log_size", "restarts", "deadline", "site")


def check_surroundings(run: RunDir, job: JobRecord) -> None:
    """Refuse to start outside of a Slurm job, or without the working folder."""
    if "SLURM_JOB_ID" not in os.environ:
        hint = f"submit it: sbatch {run.script}"
        raise RunError("this script must run in a Slurm job", where=run.name, hint=hint)
    if not Path(job.workdir).is_dir():
        raise RunUnreadable("no such working folder", where=job.workdir)


def my_job() -> str:
    """The id of this job; A_N for an array's element, as A alone means all of them."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID", "")


def element(run: RunDir, check: Callable[[RunDir], None]) -> RunDir:
    """The run of an array's element: a folder of its own beside the script's.

    Args:
        check: refuses a folder of another user, who may have made it before.
    """
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if not task:
        return run
    own = RunDir(run.path.with_name(f"{run.name}_{task}"))
    with contextlib.suppress(FileExistsError):
        own.path.mkdir(mode=0o700)
    check(own)
    if not own.job.exists():
        own.attempts.mkdir(exist_ok=True)
        own.host.write_bytes(run.host.read_bytes())
        if run.package.exists():
            own.package.write_bytes(run.package.read_bytes())
        own.script.write_bytes(_script_of(own, run.script.read_bytes()))
        job = record.read(run)
        job.slurm_name, job.run = job.name, own.name
        record.write(own, job)
    return own


def _script_of(run: RunDir, script: bytes) -> bytes:
    """The script for another run folder: a follow-up of an element is in no array."""
    line = b"readonly RUN=" + os.fsencode(shlex.quote(str(run.path)))
    return re.sub(rb"^readonly RUN=.*$", lambda _: line, script, count=1, flags=re.MULTILINE)


def job_attempt(run: RunDir, job_id: str, pid: int) -> Attempt:
    """The facts of an attempt that begins now in a Slurm job; see ``ledger.new_attempt``."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", os.uname().nodename)
    facts = ledger.new_attempt(job_id, pid, slurm=True, nodes=nodes)
    facts.restarts = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    earlier = ledger.last(run)
    same = earlier and earlier.allocation == facts.allocation
    if earlier and same and earlier.action == decision.HERE:  # Slurm need not be asked
        known = ledger.refreshed(run, earlier)
        return replace(facts, **{name: getattr(known, name) for name in KEPT})
    facts.said_id = os.environ["SLURM_JOB_ID"]
    facts.deadline = float(os.environ.get("SLURM_JOB_END_TIME") or 0) or None
    with contextlib.suppress(OSError):  # the script's log
        facts.said = str(Path("/proc/self/fd/2").readlink())
        size = os.fstat(2).st_size
        facts.said_size = min(size, int(os.environ.get("HPCDDP_SAID") or size))
        if not Path(facts.said).is_relative_to(run.path) and stat.S_ISREG(os.fstat(2).st_mode):
            join_logs(run, facts)
    with contextlib.suppress(SlurmUnreachable):
        job = slurm.facts(job_id, ASK)
        if job and job.running:  # else it may be requeued already
            facts.restarts, facts.deadline = job.restarts, job.end
        facts.site = rules.read(os.environ.get("SLURM_JOB_PARTITION", ""), ASK)._asdict()
    return facts


def join_logs(run: RunDir, facts: Attempt) -> None:
    """Copy the script's output so far from a file of its node to the run's log; the sentry adds
    Slurm's later messages."""
    node_log, size, log = facts.said, facts.said_size, run.job_log(facts.job_id)
    with log.open("ab") as f:
        f.write(Path("/proc/self/fd/2").read_bytes()[:size])
        facts.said, facts.said_size = str(log), f.tell()
    facts.node_log, facts.node_log_size = node_log, size
