"""The jobs of a run: their ids, as the run dir knows them, and their rows at the backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from hpcddp import record
from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.commands import QueuedJob
from hpcddp.submit.backends import BACKENDS

ELEMENT = re.compile(r"_\d+$")  # at the end of an id: the job is an element of an array

# Slurm's reason for a job that waits until it is released -> why; squeue writes some with spaces,
# scontrol with underscores. The first that matches.
HELD = (
    ("JobHeldAdmin", "an administrator holds it, and one has to run"),
    ("JobHeldUser", "it is held until you run"),
    ("JobHoldMaxRequeue", "Slurm holds it, since its start failed too often, until you run"),
    ("launch.failed.*held", "Slurm holds it, since its start failed on a node, until you run"),
    (".*held.*", "Slurm holds it until you run"),
)


def current(run: RunDir) -> str | None:
    """The newest job of a run; None if it was only rendered, or refused."""
    submitted = read_json(run.submission) or {}
    last = ledger.last(run)
    if last and last.began > submitted.get("submitted", 0.0):
        return last.successor or last.job_id
    return submitted.get("job_id")


def job_ids(run: RunDir) -> set[str]:
    """Every job that has worked on a run, or waits to, as far as its folder knows."""
    submitted = read_json(run.submission) or {}
    known = {name for a in ledger.attempts(run) for name in (a.job_id, a.successor) if name}
    return known | {str(submitted.get("job_id"))}


def rows_of(run: RunDir, rows: Iterable[QueuedJob]) -> list[QueuedJob]:
    """The rows of a run's jobs among others, newest first: by known ids, or by name and folder.

    A rendered script may lie anywhere: then the job has the run's own name, and its command names
    no other run. An array's elements have run dirs of their own, and the name and command of their
    array.
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
    """The row of a run's job: by its id, or by name and folder if sbatch never gave the id.

    Args:
        queue: gives the rows of all jobs on Slurm; without it Slurm is asked about this run.
    """
    if backend != "slurm":
        return BACKENDS[backend].look(run, job_id) if job_id else None
    rows = rows_of(run, queue() if queue else slurm.queue(name=record.read(run).name))
    row = next((r for r in rows if r.job_id == job_id), None)
    return row if row and row.live else next((r for r in rows if r.live), row)


def explained(row: QueuedJob) -> str:
    """Slurm's reason for a job's state; for a held job also the command that releases it."""
    why = next((words for pattern, words in HELD if re.fullmatch(pattern, row.reason)), "")
    return f"{row.reason}: {why} scontrol release {row.job_id}" if why else row.reason
