"""The jobs of a run: their ids in the run folder, and their rows at the backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from hpcddp import record
from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import other_clusters
from hpcddp.slurm.commands import QueuedJob
from hpcddp.slurm.pending_reasons import sentence
from hpcddp.submit.backends import BACKENDS

ELEMENT = re.compile(r"_\d+$")  # at the end of an id: the job is an element of an array


def current(run: RunDir) -> str | None:
    """The newest job of a run; None for a run that was only rendered or was refused."""
    submitted = read_json(run.submission) or {}
    last = ledger.last(run)
    if last and last.began > submitted.get("submitted", 0.0):
        return last.successor or last.job_id
    return submitted.get("job_id")


def job_ids(run: RunDir) -> set[str]:
    """The ids of all jobs of a run that its folder knows."""
    submitted = read_json(run.submission) or {}
    known = {name for a in ledger.attempts(run) for name in (a.job_id, a.successor) if name}
    return known | {str(submitted.get("job_id"))}


def rows_of(run: RunDir, rows: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Select the rows of a run's jobs, newest first: by known ids, or by name and folder.

    A rendered script may be in any folder: then the job has the run's name, and its command names
    no other run. The elements of an array have run folders of their own, but the name and command
    of the array.
    """
    name, ids = record.read(run).name, job_ids(run)

    def ours(row: QueuedJob) -> bool:
        if row.name != name:
            return False
        mine = row.is_in(str(run.path)) or (name == run.name and not row.is_in_any())
        return row.job_id in ids or (mine and not ELEMENT.search(row.job_id))

    return [row for row in rows if ours(row)]


def find_row(
    run: RunDir, backend: str, job_id: str | None, queue: Callable[[], list[QueuedJob]] | None
) -> QueuedJob | None:
    """The row of a run's job: by its id, or by name and folder if sbatch returned no id.

    Args:
        queue: returns the rows of all jobs at Slurm; without it, Slurm is asked about this run.
    """
    if backend != "slurm":
        return BACKENDS[backend].look(run, job_id) if job_id else None
    job = record.read(run)
    with other_clusters.asked(job.clusters):
        all_rows = queue() if queue else slurm.queue(name=job.name)
    rows = rows_of(run, all_rows)
    row = next((r for r in rows if r.job_id == job_id), None)
    return row if row and row.live else next((r for r in rows if r.live), row)


def explained(row: QueuedJob) -> str:
    """Why a job waits, and what to change; Slurm's reason for another state."""
    waits = row.state == "PENDING" or "HOLD" in row.state or row.state == "SPECIAL_EXIT"
    return sentence(row.reason, row.job_id) if waits else row.reason
