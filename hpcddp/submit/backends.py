"""Step 6: the backends that take a script. One row each: submit, look, ask to stop, cancel."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from typing import NamedTuple

from hpcddp import processes, record
from hpcddp.attempt import ledger
from hpcddp.errors import HpcddpError, SlurmUnreachable
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import environment, sbatch
from hpcddp.slurm.commands import QueuedJob


class Backend(NamedTuple):
    """The operations of a backend."""

    submit: Callable[[Plan, RunDir], str]  # -> job id
    look: Callable[[RunDir, str], QueuedJob | None]  # run, job id -> its row, None if it is gone
    tell: Callable[[str], None]  # tell the ranks of a job that a request lies in the run dir
    drop: Callable[[str], None]  # cancel a job that waits, and so has nothing to save
    cancel: Callable[[str], None]


def submit_slurm(plan: Plan, run: RunDir) -> str:
    """Hand the rendered script to Slurm through submitit; the job id."""
    from hpcddp.submit.executor import submit

    try:
        return submit(plan, run)
    except HpcddpError:
        raise
    except Exception as error:  # submitit raises several classes with sbatch's words
        words = str(getattr(error, "stderr", "") or error)
        return _after_failure(run, words)


def _after_failure(run: RunDir, words: str) -> str:
    """Raise what the failure of sbatch means. Unless it refused, the job may exist all the same:
    then a job of the run's name is in the queue, and this is its id."""
    if refused := sbatch.refusal(words, run.script):
        raise refused
    try:
        known = [row for row in slurm.queue(name=run.name) if row.live]
    except SlurmUnreachable:
        hint = f"do not submit again: hpcddp status {run.name} asks for it"
        what = f"whether the job {run.name} exists is unknown: sbatch did not answer"
        raise SlurmUnreachable(what, where=str(run.script), hint=hint) from None
    if known:
        return known[0].job_id
    what = slurm.first_line(sbatch.error_line(words) or words)
    raise SlurmUnreachable(what, where=str(run.script), hint="there is no job; submit again later")


def look_slurm(run: RunDir, job_id: str) -> QueuedJob | None:
    return slurm.job(job_id, record.read(run).name)


def tell_slurm(job_id: str) -> None:
    slurm.cancel(job_id, state="RUNNING", signal="USR2")


def drop_slurm(job_id: str) -> None:
    slurm.cancel(job_id, state="PENDING")


def submit_local(plan: Plan, run: RunDir) -> str:
    """Start the script on this machine in a session of its own; its process id."""
    with run.job_log("local").open("ab") as log:
        process = subprocess.Popen(
            ["/bin/bash", str(run.script)], cwd=plan.folder(run), env=environment.clean(os.environ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    return str(process.pid)


def look_local(run: RunDir, job_id: str) -> QueuedJob | None:
    """A row like Slurm's, from the process table; another host's processes cannot be seen."""
    attempt = ledger.last(run)
    if attempt and attempt.job_id == job_id:
        if attempt.host != os.uname().nodename:
            hint = f"ask there: ssh {attempt.host}"
            raise SlurmUnreachable(f"the run is on {attempt.host}", hint=hint)
        alive = processes.start_of(attempt.pid) == attempt.pid_start != ""
    else:
        alive = bool(processes.start_of(int(job_id)))
    if not alive:
        return None
    return QueuedJob(job_id, "RUNNING", "None", None, None, "", run.name)


def cancel_local(job_id: str) -> None:
    """Send TERM to the script's process group; its launcher ends the ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(job_id), signal.SIGTERM)


def _nothing(job_id: str) -> None:
    """Do nothing: ranks here look into the run dir every second, and no job waits."""


BACKENDS = {
    "slurm": Backend(submit_slurm, look_slurm, tell_slurm, drop_slurm, slurm.cancel),
    "local": Backend(submit_local, look_local, _nothing, _nothing, cancel_local),
}
