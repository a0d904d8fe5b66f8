"""Before step 3: the times of a job's earlier runs, from their ledgers and metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
LEAD = 30  # seconds of a stop, if the times of the job's steps and saves are unknown
MOST_LEAD = 65535  # seconds; the most that sbatch accepts


class Measured(NamedTuple):
    """The times of an earlier run, in seconds: the slowest of its latest steps and saves.

    Args:
        step: 0, like save, if only the start is known.
        start: from the batch script's first act to the first step's record; if only that is known,
            until the ranks of a command had met.
    """

    step: float
    save: float
    start: float
    run: str = ""

    @property
    def trained(self) -> bool:
        """Whether the times of steps and saves are known."""
        return self.step > 0 or self.save > 0

    @property
    def stop(self) -> float:
        """From a signal to a complete checkpoint: the current step, and the save."""
        return self.step + self.save

    @property
    def lead(self) -> int:
        """The start of a stop before the time limit: twice a step and a save, as in the ranks."""
        if not self.trained:
            return LEAD
        return min(math.ceil(2 * self.stop + MARGIN), MOST_LEAD)


def of_job(name: str, backend: str, root: Path) -> Measured | None:
    """The times of a job's newest run that has all of them, or else of the newest that has a start;
    None without Slurm, which sets time limits.

    Args:
        root: the folder of the runs.
    """
    if backend != "slurm":
        return None
    return _best(map(measured, _alike(name, backend, root)))


def _best(rows: Iterable[Measured | None]) -> Measured | None:
    """The first that has the times of steps and saves, or else the first that has any."""
    start_alone = None
    for times in rows:
        if times and times.trained:
            return times
        start_alone = start_alone or times
    return start_alone


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
    """The times of the run's newest attempt that has all of them, or else of the newest that has a
    start; None if there is none."""
    from hpcddp.attempt import ledger, rendezvous  # not needed for a job's first run

    try:
        attempts, job = ledger.attempts(run), record.read(run)
    except RunError:
        return None
    met = bool(job.spec.get("command")) and not rendezvous.hidden(job)
    rows = ((facts, run.attempt(facts.number)) for facts in reversed(attempts))
    return _best(_measured(facts, folder) or (_start(facts, folder) if met else None)
                 for facts, folder in rows)  # fmt: skip


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


def _start(facts: Attempt, folder: AttemptDir) -> Measured | None:
    """The start alone, of a command whose ranks have met and record nothing themselves."""
    try:
        met = folder.met.stat().st_mtime
    except OSError:
        return None
    return Measured(0.0, 0.0, max(0.0, met - facts.began), folder.path.parent.parent.name)


def _latest(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A value of the newest records that have it."""
    return [float(r[name]) for r in rows if isinstance(r.get(name), int | float)][-LATEST:]
