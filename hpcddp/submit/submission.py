"""Submission: a job id and its run folder. Submit, find, stop, cancel and resume runs."""

from __future__ import annotations

import contextlib
import os
import shutil
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
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import other_clusters
from hpcddp.submit.backends import BACKENDS, Note
from hpcddp.submit.run_jobs import job_ids, rows_of
from hpcddp.submit.run_list import START, last_submitted, runs_of
from hpcddp.submit.status import Status, status


def submit(plan: Plan, run: RunDir, *, new: bool = False, note: Note = lambda text: None) -> str:
    """Hand a run to its backend; the job id. A refusal is recorded in the run folder.

    Args:
        new: the caller has just made the run, and nothing else knows it.
        note: called with a text for the user if the job was changed to be accepted.

    Raises:
        SubmissionRefused: sbatch refused the job.
        SlurmUnreachable: Slurm does not answer. If there is certainly no job, a new run is removed;
            any other is as before.
    """
    before = read_json(run.submission)
    run.request.unlink(missing_ok=True)
    facts: dict[str, Any] = {"backend": plan.backend, "submitted": time.time(), "job_id": None}
    write_json(run.submission, facts)  # from here on the job is found by its name
    try:
        facts["job_id"] = BACKENDS[plan.backend].submit(plan, run, note)
    except SubmissionRefused as error:
        write_json(run.submission, facts | {"refused": error.what})
        raise
    except SlurmUnreachable:
        if not run.submission.exists():  # the backend says by this that there is no job
            undo(run, before, new=new)
        raise
    write_json(run.submission, facts)
    show_log(run, plan.backend, str(facts["job_id"]))
    return str(facts["job_id"])


def undo(run: RunDir, before: dict[str, Any] | None, *, new: bool) -> None:
    """Leave a run as it was before a submission that made no job: a new one is removed. A rendered
    one stays, as its script may be in Slurm's queue."""
    if before is not None:
        write_json(run.submission, before)
    elif new:
        shutil.rmtree(run.path, ignore_errors=True)


def show_log(run: RunDir, backend: str, job_id: str) -> None:
    """Create a log at submission; the job replaces the link by one to its own log."""
    path = run.job_log(job_id if backend == "slurm" else "local")
    path.touch()
    with contextlib.suppress(FileExistsError):
        run.log.symlink_to(path.name)


def find(root: Path, token: str) -> RunDir:
    """The run with a name, a unique prefix, a job id or a path; `last` is the one submitted last.

    Raises:
        RunError: no run matches, or several do.
    """
    if "/" in token and (Path(token) / "job.json").is_file():
        return RunDir(token)
    runs = runs_of(root)
    if token == "last" and (last := last_submitted(runs)):
        return last
    matches = (
        [run for run in runs if run.name == token]
        or [run for run in runs if token.isdigit() and token in job_ids(run)]
        or [run for run in runs if run.name.startswith(token)]
    )
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(run.name for run in matches[:8]) + (", ..." if matches[8:] else "")
        what = f"{token!r} matches {len(matches)} runs: {names}"
        raise RunError(what, where=str(root), hint="write more of the name")
    if token == "last" or not runs:
        what = "no run in this folder was submitted yet" if runs else "no runs yet"
        rendered = f"name the rendered run, {runs[0].name}; or " if runs else ""
        raise RunError(what, where=str(root), hint=f"{rendered}{START}")
    hint = nearest(token, ["last", *(run.name for run in runs[:20])], what="run")
    raise RunError(f"no run {token!r}", where=str(root), hint=hint)


TRIES = 3  # requests to Slurm before it counts as unreachable

# Request -> the operations of a backend that pass it to the jobs.
REQUESTS = {"stop": ("drop", "tell"), "preempt": ("tell",), "cancel": ("cancel",)}


def request(run: RunDir, want: str) -> Status:
    """Stop, preempt or cancel a run; returns its status before that.

    Raises:
        RunError: the run's state does not allow it.
    """
    before = _status(run)
    if before.stale:
        raise SlurmUnreachable(
            before.reason, where=run.name, hint="nothing was requested; try again"
        )
    last = ledger.last(run)
    # A follow-up job may not be in the queue yet: it finds the request in the run folder.
    returns = bool(last and last.action in RETURNS and before.backend == "slurm")
    ends = before.final and not (returns and want != "preempt")
    if ends or not before.job_id or (want == "preempt" and before.state != "RUNNING"):
        what = f"cannot {want} a run that is {before.state}"
        hint = "the run has no pending or running job"
        hint = "only a RUNNING run can be preempted" if want == "preempt" else hint
        raise RunError(what, where=run.name, hint=hint)
    if want == "preempt" and not (last and last.live):  # a starting attempt would miss it
        hint = "try again when its attempt has started"
        raise RunError("the run is still starting", where=run.name, hint=hint)
    write_json(run.request, {"want": want, "job_id": before.job_id, "when": time.time()})
    backend = BACKENDS[before.backend]
    clusters = record.read(run).clusters.split(",")
    for cluster in clusters:
        with other_clusters.asked(cluster):
            # Of several clusters, each may have a job of that number.
            for job_id in live_jobs(run, before, seen=len(clusters) > 1):
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


def live_jobs(run: RunDir, before: Status, *, seen: bool = False) -> list[str]:
    """The waiting and running jobs of a run: several if an answer of sbatch was lost. Slurm may
    have given the id of an ended job to another one.

    Args:
        before: the status of the run.
        seen: only those that Slurm lists now.
    """
    ids = [] if before.final or seen else [str(before.job_id)]
    for _ in range(TRIES if before.backend == "slurm" else 0):
        with contextlib.suppress(SlurmUnreachable):
            rows = rows_of(run, slurm.queue(name=record.read(run).name))
            return ids + [row.job_id for row in rows if row.live and row.job_id not in ids]
    return ids


def insist(act: Callable[[str], None], job_id: str) -> None:
    """Ask Slurm, and again if it does not answer: a second request changes nothing.

    Raises:
        SlurmUnreachable: no request was answered. The run folder holds the request: a running job
            reads it there, and so does a job that starts later.
    """
    for left in reversed(range(TRIES)):
        try:
            act(job_id)
            return
        except SlurmUnreachable:
            if not left:
                raise


def check_ended(run: RunDir) -> None:
    """Refuse a run that has not ended."""
    now = _status(run)
    if now.stale:
        raise SlurmUnreachable(now.reason, where=run.name, hint="try again")
    if not now.final:
        raise RunError(
            f"the run has not ended: job {now.job_id} is {now.state}",
            where=run.name,
            hint=f"`hpcddp stop {run.name}` saves and ends it",
        )


def kill_local(run: RunDir) -> None:
    """Kill a run on this machine and all of its ranks (SIGKILL)."""
    submitted = read_json(run.submission) or {}
    write_json(run.request, {"want": "cancel", "job_id": submitted["job_id"], "when": time.time()})
    with contextlib.suppress(ProcessLookupError):
        os.killpg(int(submitted["job_id"]), signal.SIGKILL)
