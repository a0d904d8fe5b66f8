"""Step 6: the backends, Slurm and this machine: submit a job, look it up, signal it, cancel it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from hpcddp import processes, record
from hpcddp.attempt import ledger
from hpcddp.errors import HpcddpError, SlurmUnreachable, SubmissionRefused
from hpcddp.planning.plan import Plan
from hpcddp.planning.site import profile_check
from hpcddp.rundir import RunDir
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import environment, other_clusters, sbatch
from hpcddp.slurm.commands import QueuedJob

WITHOUT_MEMORY = (
    "sbatch refused --mem, which hpcddp had added, and accepted the job without it: to leave it "
    "out each time, set mem = false in [slurm] of the profile, or use --sbatch mem=false"
)
NOT_SENT = "(connect failure)"  # in sbatch's message: no controller has seen the job

Note = Callable[[str], None]  # passes a text on to the user


class Backend(NamedTuple):
    """The operations of a backend."""

    submit: Callable[[Plan, RunDir, Note], str]  # -> job id
    look: Callable[[RunDir, str], QueuedJob | None]  # run, job id -> its row, None if it has ended
    tell: Callable[[str], None]  # signal a job's ranks that the run folder holds a request
    drop: Callable[[str], None]  # cancel a waiting job, which has nothing to save
    cancel: Callable[[str], None]


def submit_slurm(plan: Plan, run: RunDir, note: Note) -> str:
    """Hand the rendered script to Slurm through submitit; the job id. If the site refuses the
    memory that hpcddp has added to it, the script is rendered and submitted again without it.
    """
    from hpcddp.submit.executor import submit

    try:
        return submit(plan, run)
    except HpcddpError:
        raise
    except Exception as error:  # submitit raises several classes with sbatch's message
        words = str(getattr(error, "stderr", "") or error)
        if refused := sbatch.refusal(words, run.script):
            return _without_memory(plan, run, refused, note)
        return _without_answer(run, words)


def _without_memory(plan: Plan, run: RunDir, refused: SubmissionRefused, note: Note) -> str:
    """Submit a refused job once more, if the memory that hpcddp added is why; the job id.

    Raises:
        SubmissionRefused: it has another reason.
    """
    from hpcddp.submit import prepare

    try:
        if not profile_check.refuses_memory(plan, run):
            raise refused
    except SlurmUnreachable:
        raise refused from None
    plain = replace(plan, memory=0)
    prepare.write_script(run, plain.render(run, plain.worker_command(run)))
    job_id = submit_slurm(plain, run, note)
    note(WITHOUT_MEMORY)
    return job_id


def _without_answer(run: RunDir, words: str) -> str:
    """The id of a job that may exist though sbatch failed: the queue has one with the run's name.

    Raises:
        SlurmUnreachable: there is no answer. If there is certainly no job either, submission.json
            is removed.
    """
    if NOT_SENT not in words:
        try:
            with other_clusters.asked(record.read(run).clusters):
                known = [row for row in slurm.queue(name=run.name) if row.live]
        except SlurmUnreachable:
            hint = f"do not submit it again: `hpcddp status {run.name}` looks for the job"
            what = f"Slurm does not answer: the job {run.name} may have been submitted or not"
            raise SlurmUnreachable(what, where=str(run.script), hint=hint) from None
        if known:
            return known[0].job_id
    run.submission.unlink(missing_ok=True)
    what = slurm.first_line(sbatch.error_line(words) or words)
    hint = "no job was submitted; try again later"
    raise SlurmUnreachable(f"Slurm does not answer: {what}", where="sbatch", hint=hint)


def look_slurm(run: RunDir, job_id: str) -> QueuedJob | None:
    return slurm.job(job_id, record.read(run).name)


def tell_slurm(job_id: str) -> None:
    slurm.cancel(job_id, state="RUNNING", signal="USR2")


def drop_slurm(job_id: str) -> None:
    slurm.cancel(job_id, state="PENDING")


def submit_local(plan: Plan, run: RunDir, note: Note) -> str:
    """Start the script on this machine in a new session; returns its process id. There is nothing
    to note."""
    with run.job_log("local").open("ab") as log:
        process = subprocess.Popen(
            ["/bin/bash", str(run.script)], cwd=plan.folder(run), env=environment.clean(os.environ),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    return str(process.pid)


def look_local(run: RunDir, job_id: str) -> QueuedJob | None:
    """A row like Slurm's, made from the process table of this host."""
    attempt = ledger.last(run)
    if attempt and attempt.job_id == job_id:
        if attempt.host != os.uname().nodename:
            hint = f"run the command there: ssh {attempt.host}"
            what = f"the run is on {attempt.host}, which this host cannot see"
            raise SlurmUnreachable(what, hint=hint)
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
    """Do nothing: local ranks look for requests every second, and a local job never waits."""


BACKENDS = {
    "slurm": Backend(submit_slurm, look_slurm, tell_slurm, drop_slurm, slurm.cancel),
    "local": Backend(submit_local, look_local, _nothing, _nothing, cancel_local),
}
