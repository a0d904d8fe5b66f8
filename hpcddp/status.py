"""Status: what can be said of a run now.

What is known lies in the run dir; a backend is asked only about a run that has not ended there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcddp import ledger, slurm
from hpcddp.backends import BACKENDS
from hpcddp.errors import SlurmUnreachable
from hpcddp.rundir import RunDir, read_json, runs_in
from hpcddp.slurm import JobRow

OUTCOMES = {
    ledger.DONE: "COMPLETED",
    ledger.STOPPED: "STOPPED",
    ledger.CANCELLED: "CANCELLED",
    ledger.FAILED: "FAILED",
}
REQUESTS = {"stop": "STOPPED", "cancel": "CANCELLED"}
FINAL = {
    "COMPLETED", "STOPPED", "CANCELLED", "FAILED", "REFUSED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
    "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "LOST", "RENDERED",
}  # fmt: skip
TAIL = 1 << 16  # bytes of the metrics file that status reads


@dataclass
class Status:
    """What can be said of a run now."""

    run: str
    state: str
    path: str
    job_id: str | None
    backend: str
    nodes: str
    gpus_per_node: int
    created: float  # seconds since the epoch
    attempt: int
    hosts: str = ""
    reason: str = ""  # why it waits, as Slurm says it, or why it ended
    since: str = ""  # local time at which the state began
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    loss: float | None = None
    metrics: dict[str, float] | None = None
    stale: bool = False  # Slurm did not answer: this is the last known state

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        return {"schema_version": 1, **asdict(self), "log": f"{self.path}/log"}


def current(run: RunDir) -> tuple[str | None, str]:
    """The newest job of a run and its backend; no job if it was rendered or refused only."""
    job = read_json(run.job) or {}
    record = read_json(run.submission) or {}
    last = ledger.last(run)
    if last and last.began > record.get("submitted", 0.0):
        return last.job_id, job["backend"]
    return record.get("job_id"), job["backend"]


def status(run: RunDir, look: Callable[[RunDir, str], JobRow | None] | None = None) -> Status:
    """The state of a run; a run that lives is looked up at its backend.

    Args:
        look: finds the row of a job instead of the backend.
    """
    found = known(run)
    if found.final or not found.job_id:
        return found
    try:
        row = (look or BACKENDS[found.backend].look)(run, found.job_id)
    except SlurmUnreachable as error:
        found.stale, found.reason = True, error.what
        return found
    if row is None:
        again = known(run)  # it may have ended between the two looks
        return again if again.final else gone(run, again)
    found.state, found.hosts = row.state, row.hosts or found.hosts
    found.reason = "" if row.reason == "None" else row.reason
    found.since = (row.submitted if row.state == "PENDING" else row.start) or found.since
    return found


def status_all(root: Path) -> list[Status]:
    """The state of all runs of a folder, newest first, with one question to Slurm."""
    rows: list[JobRow] | SlurmUnreachable | None = None

    def look(run: RunDir, job_id: str) -> JobRow | None:
        nonlocal rows
        if rows is None:
            try:
                rows = slurm.queue()
            except SlurmUnreachable as error:
                rows = error
        if isinstance(rows, SlurmUnreachable):
            raise rows
        return next((r for r in rows if (r.job_id, r.name) == (job_id, run.name)), None)

    found = []
    for run in runs_in(root):
        on_slurm = (read_json(run.job) or {}).get("backend") == "slurm"
        found.append(status(run, look if on_slurm else None))
    return found


def gone(run: RunDir, found: Status) -> Status:
    """A job that left no end and that its backend does not know any more."""
    request = read_json(run.request) or {}
    found.state = REQUESTS.get(request.get("want", ""), "LOST")
    found.reason = "" if request else "the job is gone and left no word; its log may tell"
    return found


def known(run: RunDir) -> Status:
    """What the run dir alone says."""
    job = read_json(run.job) or {}
    record = read_json(run.submission) or {}
    job_id, backend = current(run)
    low, high = job["nodes"]
    found = Status(
        run=run.name,
        state="RENDERED",
        path=str(run.path),
        job_id=job_id,
        backend=backend,
        nodes=str(low) if low == high else f"{low}-{high}",
        gpus_per_node=job["gpus_per_node"],
        created=job["created"],
        attempt=0,
    )
    last = ledger.last(run)
    if last:
        found.attempt, found.hosts, found.since = last.number, last.nodes, stamp(last.began)
        progress(run, last.number, found)
    if record.get("refused") and not job_id:
        found.state, found.reason = "REFUSED", record["refused"]
    elif last and last.job_id == job_id:
        found.state = OUTCOMES.get(last.outcome or "", "RUNNING")
        found.since = stamp(last.ended or last.began)
        found.reason = failure(run, last.number) if last.outcome == ledger.FAILED else ""
    elif job_id:
        found.state, found.since = "PENDING", stamp(record["submitted"])
    elif record:
        found.state, found.reason = (
            "LOST",
            "sbatch did not answer: whether there is a job is unknown",
        )
    return found


def failure(run: RunDir, number: int) -> str:
    """Why an attempt failed, in one line."""
    error = read_json(run.attempt(number).error)
    if not error:
        return "no rank said why; the log may tell"
    message = error["message"].partition("\n")[0]
    return f"rank {error['rank']} on {error['host']}: {error['type']}: {message}"


def progress(run: RunDir, number: int, found: Status) -> None:
    """Fill in step, epoch, loss and metrics from the end of the metrics file."""
    for record in reversed(list(tail(run.attempt(number).metrics))):
        found.step = found.step or record.get("step", 0)
        found.epoch = found.epoch or record.get("epoch", 0)
        if record.get("event") == "train" and found.loss is None:
            found.loss = record["loss"]
        if record.get("event") == "eval" and found.metrics is None:
            found.metrics = record["metrics"]
    for record in head(run.attempt(number).metrics):
        found.total_steps = record.get("total_steps", found.total_steps)


def head(path: Path) -> list[dict[str, Any]]:
    """The first two records: the rank map and the start."""
    try:
        with path.open(encoding="utf-8") as f:
            return list(_records([f.readline(), f.readline()]))
    except FileNotFoundError:
        return []


def tail(path: Path) -> Iterable[dict[str, Any]]:
    """The last records of a JSON lines file, without reading the whole of it."""
    try:
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - TAIL))
            lines = f.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []
    return _records(lines[1:] if size > TAIL else lines)


def _records(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue  # cut in the middle by a crash or by our reading


def stamp(seconds: float) -> str:
    """Local time as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
