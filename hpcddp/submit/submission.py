"""Submission: a job id and its RunDir. Submit, find, stop, cancel and resume runs."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcddp import record
from hpcddp.attempt import ledger
from hpcddp.attempt.decision import RETURNS
from hpcddp.errors import RunError, SlurmUnreachable, SubmissionRefused
from hpcddp.keys import nearest
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir, read_json, runs_in, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.submit.backends import BACKENDS
from hpcddp.submit.run_jobs import job_ids, rows_of
from hpcddp.submit.status import Status, status


def submit(plan: Plan, run: RunDir) -> str:
    """Hand a run to its backend; the job id. A refusal is written into the run dir, and raised."""
    run.request.unlink(missing_ok=True)
    facts: dict[str, Any] = {"backend": plan.backend, "submitted": time.time(), "job_id": None}
    write_json(run.submission, facts)  # from here on the job is found by its name
    try:
        facts["job_id"] = BACKENDS[plan.backend].submit(plan, run)
    except SubmissionRefused as error:
        write_json(run.submission, facts | {"refused": error.what})
        raise
    write_json(run.submission, facts)
    show_log(run, plan.backend, str(facts["job_id"]))
    return str(facts["job_id"])


def show_log(run: RunDir, backend: str, job_id: str) -> None:
    """Make a log from the moment of submission; the job's first act points to its own."""
    path = run.job_log(job_id if backend == "slurm" else "local")
    path.touch()
    with contextlib.suppress(FileExistsError):
        run.log.symlink_to(path.name)


def find(root: Path, token: str) -> RunDir:
    """The run that a word names: a name, a unique prefix, a job id, `last` or a path.

    Raises:
        RunError: the word matches no run, or several.
    """
    if "/" in token and (Path(token) / "job.json").is_file():
        return RunDir(token)
    runs = runs_in(root)
    if token == "last" and runs:
        return runs[0]
    matches = (
        [run for run in runs if run.name == token]
        or [run for run in runs if token.isdigit() and token in job_ids(run)]
        or [run for run in runs if run.name.startswith(token)]
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.name for run in matches[:8])
        raise RunError(
            f"{token!r} means {len(matches)} runs", where=str(root), hint=f"which: {names}?"
        )
    hint = nearest(token, [run.name for run in runs[:20]], what="run")
    raise RunError(f"no run {token!r}", where=str(root), hint=hint)


TRIES = 3  # of a request to Slurm that gets no answer

# Request -> the operations of a backend that bring it to the jobs.
REQUESTS = {"stop": ("drop", "tell"), "preempt": ("tell",), "cancel": ("cancel",)}


def request(run: RunDir, want: str) -> Status:
    """Ask a run to stop or to come back (preempt), or cancel it; its status before that.

    Raises:
        RunError: there is nothing that could be stopped.
    """
    before = _status(run)
    if before.stale:
        raise SlurmUnreachable(before.reason, where=run.name, hint="nothing was asked; try again")
    last = ledger.last(run)
    # A follow-up job may be on its way into the queue: it finds the request in the run dir.
    returns = bool(last and last.action in RETURNS and before.backend == "slurm")
    ends = before.final and not (returns and want != "preempt")
    if ends or not before.job_id or (want == "preempt" and before.state != "RUNNING"):
        raise RunError(f"the run is {before.state}: there is nothing to {want}", where=run.name)
    if want == "preempt" and not (last and last.live):  # a starting attempt would miss it
        raise RunError("the run starts: there is nothing to preempt yet", where=run.name)
    write_json(run.request, {"want": want, "job_id": before.job_id, "when": time.time()})
    backend = BACKENDS[before.backend]
    for job_id in live_jobs(run, before):
        for act in (getattr(backend, name) for name in REQUESTS[want]):
            insist(act, job_id)
    return before


def _status(run: RunDir) -> Status:
    """The status of a run; Slurm is asked again if it does not answer."""
    answer = status(run)
    for _ in range(TRIES - 1):
        if answer.stale:
            answer = status(run)
    return answer


def live_jobs(run: RunDir, before: Status) -> list[str]:
    """The jobs of a run that live: more than one if an answer of sbatch was lost. The id of a job
    that is gone may be another job's by now.

    Args:
        before: the status of the run.
    """
    ids = [] if before.final else [str(before.job_id)]
    for _ in range(TRIES if before.backend == "slurm" else 0):
        with contextlib.suppress(SlurmUnreachable):
            rows = rows_of(run, slurm.queue(name=record.read(run).name))
            return ids + [row.job_id for row in rows if row.live and row.job_id not in ids]
    return ids


def insist(act: Callable[[str], None], job_id: str) -> None:
    """Ask Slurm, and ask again if it does not answer: a second request changes nothing.

    Raises:
        SlurmUnreachable: it did not answer the last time either. The request lies in the run dir:
            a running job takes it from there, and one that begins later too.
    """
    for left in reversed(range(TRIES)):
        try:
            act(job_id)
            return
        except SlurmUnreachable:
            if not left:
                raise


def check_ended(run: RunDir) -> None:
    """Refuse while the run lives."""
    now = _status(run)
    if now.stale:
        raise SlurmUnreachable(now.reason, where=run.name, hint="try again")
    if not now.final:
        raise RunError(
            f"the run is {now.state} as job {now.job_id}",
            where=run.name,
            hint=f"hpcddp stop {run.name} saves and ends it first",
        )


def kill_local(run: RunDir) -> None:
    """KILL a run on this machine, with all of its ranks."""
    submitted = read_json(run.submission) or {}
    write_json(run.request, {"want": "cancel", "job_id": submitted["job_id"], "when": time.time()})
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(submitted["job_id"]), signal.SIGKILL)
