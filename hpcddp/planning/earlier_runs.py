"""Before step 3: the times of a job's earlier runs, from their ledgers and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcddp import record
from hpcddp.errors import RunError
from hpcddp.rundir import AttemptDir, RunDir, last_lines, read_lines, runs_in

if TYPE_CHECKING:
    from hpcddp.attempt.ledger import Attempt

TAIL = 1 << 16  # bytes of the metrics file that are read
LATEST = 10  # newest records of each kind that count
RUNS = 20  # newest runs of a job that are read
MARGIN = 5.0  # seconds between the end of the last save and the time limit
MOST_LEAD = 65535  # seconds; the most that sbatch accepts


class Measured(NamedTuple):
    """The times of an earlier run, in seconds: the slowest of its latest steps and saves."""

    step: float
    save: float
    start: float  # from the batch script's first act to the first step's record
    run: str = ""

    @property
    def stop(self) -> float:
        """From a signal to a complete checkpoint: the current step, and the save."""
        return self.step + self.save

    @property
    def lead(self) -> int:
        """The start of a stop before the time limit: twice a step and a save, as in the ranks."""
        return min(math.ceil(2 * self.stop + MARGIN), MOST_LEAD)


def of_job(name: str, backend: str, root: Path) -> Measured | None:
    """The times of a job's newest run that has any; None without Slurm, which sets time limits.

    Args:
        root: the folder of the runs.
    """
    if backend != "slurm":
        return None
    return next((times for run in _alike(name, backend, root) if (times := measured(run))), None)


def _alike(name: str, backend: str, root: Path) -> Iterator[RunDir]:
    """A job's started runs on the same backend, among the newest runs with its name."""
    for run in runs_in(root, f"{name}-", RUNS):
        if not run.all_attempts():
            continue
        try:
            job = record.read(run)
        except RunError:
            continue
        if (job.spec.get("name"), job.backend) == (name, backend):
            yield run


def measured(run: RunDir) -> Measured | None:
    """The times of the run's newest attempt that has any; None if there is none."""
    from hpcddp.attempt import ledger  # not needed for a job's first run

    try:
        attempts = ledger.attempts(run)
    except RunError:
        return None
    rows = ((facts, run.attempt(facts.number)) for facts in reversed(attempts))
    return next((times for facts, folder in rows if (times := _measured(facts, folder))), None)


def _measured(facts: Attempt, folder: AttemptDir) -> Measured | None:
    first = next((r for r in read_lines(folder.metrics) if r.get("event") == "train"), None)
    tail = last_lines(folder.metrics, TAIL)
    # The first step is slower than the others: it counts only if it is the only one.
    trained = [r for r in tail if r.get("event") == "train" and r != first]
    steps = _latest(trained or ([first] if first else []), "step_s")
    saves = _latest([r for r in tail if r.get("event") == "checkpoint"], "seconds")
    if first is None or not steps or not saves:
        return None
    start = max(0.0, first["time"] - facts.began)
    return Measured(max(steps), max(saves), start, folder.path.parent.parent.name)


def _latest(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A value of the newest records that have it."""
    return [float(r[name]) for r in rows if isinstance(r.get(name), int | float)][-LATEST:]
