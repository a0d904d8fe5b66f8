"""Status: the state and the progress of a run.

Most of it is in the run folder. A backend is asked only about a run that has not ended according to
its folder; run_jobs.py finds the jobs of a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcddp import record
from hpcddp.attempt import decision, first_failure, ledger, log_reader, refused_resume
from hpcddp.attempt.decision import Policy
from hpcddp.errors import RunError, SlurmUnreachable
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, last_lines, read_json, read_lines
from hpcddp.sizes import counted
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import other_clusters
from hpcddp.slurm.commands import QueuedJob
from hpcddp.submit import times
from hpcddp.submit.run_jobs import current, explained, find_row
from hpcddp.submit.run_list import runs_of

# Cause of the last attempt's end -> state of a run that is not requeued; else FAILED.
STATES = {name: row.state for name, row in decision.CAUSES.items() if row.state}
# The run folder names no job, but a job with the run's name may exist.
UNTOLD = ("LOST", "RENDERED")
REQUESTS = {"stop": "STOPPED", "cancel": "CANCELLED"}
FINAL = {
    "COMPLETED", "STOPPED", "CANCELLED", "FAILED", "REFUSED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
    "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "LOST", "RENDERED", "DAMAGED",
}  # fmt: skip
TAIL = 1 << 16  # bytes of the metrics file that status reads


@dataclass
class Status:
    """The state and the progress of a run."""

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
    reason: str = ""  # Slurm's reason for waiting, or why the run ended
    since: str = ""  # when the state began: ISO 8601 with its offset
    expected: str = ""  # when Slurm expects a pending job to start, likewise
    step: int = 0
    total_steps: int = 0
    epoch: int = 0
    loss: float | None = None
    metrics: dict[str, float] | None = None
    policy: str = ""  # when the run is requeued
    stale: bool = False  # Slurm does not answer: this is the last known state
    refused: bool = False  # the newest resume was refused: this is the state before it

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with its schema version."""
        return {"schema_version": 1, **asdict(self), "log": f"{self.path}/log"}


def status(run: RunDir, queue: Callable[[], list[QueuedJob]] | None = None) -> Status:
    """The state of a run; the backend is asked about a run that has not ended.

    Args:
        queue: returns the rows of all jobs at Slurm, so that many runs need one request.
    """
    return asked(run, known(run), queue)


def asked(
    run: RunDir, status: Status, queue: Callable[[], list[QueuedJob]] | None = None
) -> Status:
    """The same, starting from the status according to the run folder."""
    if status.final and status.state not in UNTOLD:
        return status
    try:
        row = find_row(run, status.backend, status.job_id, queue)
    except SlurmUnreachable as error:
        if status.state != "RENDERED":
            status.stale, status.reason = True, error.what
        return status
    if row is None or not row.live:  # it may have ended meanwhile
        status = known(run)
        if row is None or (status.final and status.state not in UNTOLD):
            return status if status.final else gone(run, status)
    return _seen(status, row)


def _seen(status: Status, row: QueuedJob) -> Status:
    """The status, completed from the job's row."""
    status.state, status.job_id = row.state, row.job_id
    status.hosts = row.hosts or ("" if row.state == "PENDING" else status.hosts)
    status.reason = "" if row.reason == "None" or row.state == "CANCELLED" else explained(row)
    since = row.submitted if row.state == "PENDING" else row.start
    status.since = stamp(since) if since else status.since
    if row.state == "PENDING" and row.start:
        status.expected = stamp(row.start)
    return status


def status_all(root: Path) -> list[Status]:
    """The state of all runs of a folder, newest first, with one request to Slurm."""
    queue = once(slurm.queue)
    return [checked(run, queue) for run in runs_of(root)]


def once(ask: Callable[[], list[QueuedJob]]) -> Callable[[], list[QueuedJob]]:
    """A function that calls `ask` once for each cluster, and keeps the answers and errors."""
    answers: dict[str, list[QueuedJob] | SlurmUnreachable] = {}

    def answer() -> list[QueuedJob]:
        cluster = other_clusters.names()
        if cluster not in answers:
            try:
                answers[cluster] = ask()
            except SlurmUnreachable as error:
                answers[cluster] = error
        rows = answers[cluster]
        if isinstance(rows, SlurmUnreachable):
            raise rows
        return rows

    return answer


def checked(run: RunDir, queue: Callable[[], list[QueuedJob]]) -> Status:
    """The status of one run in a list: a damaged folder must not hide the other runs."""
    try:
        return status(run, queue)
    except RunError as error:
        path = str(run.path)
        return Status(run.name, "DAMAGED", path, None, "", "", 0, 0.0, 0, reason=error.what)


def gone(run: RunDir, status: Status) -> Status:
    """The status of a job that its backend no longer knows, and whose end is not recorded."""
    want, last = (read_json(run.request) or {}).get("want", ""), ledger.last(run)
    cause = log_reader.ending_of(last) if last and last.live else ""
    if want in REQUESTS:
        status.state, status.reason = REQUESTS[want], ""
    elif last and last.action in decision.WAITS:
        status.state, status.reason = "CANCELLED", "while it waited to be requeued"
    elif cause:
        status.state, status.reason = STATES.get(cause, "LOST"), ""
    else:
        status.state = "LOST"
        status.reason = "the job has ended without a record; see its log"
    return status


def known(run: RunDir) -> Status:
    """The status according to the run folder."""
    job = record.read(run)
    submitted = read_json(run.submission) or {}
    job_id = current(run)
    low, high = job.nodes
    status = Status(
        run=run.name,
        state="RENDERED",
        path=str(run.path),
        job_id=job_id,
        backend=job.backend,
        nodes=str(low) if low == high else f"{low}-{high}",
        gpus_per_node=job.gpus_per_node,
        created=job.created,
        attempt=0,
        policy=policy(job),
    )
    last = ledger.last(run)
    ends = refused_resume.of(run, last) if last else None
    if last and ends:
        status.attempt, status.hosts, status.since = last.number, ends.nodes, stamp(ends.began)
        status.refused = ends is not last
        progress(run, ends.number, status)
        status.step = status.step or ledger.newest_step(run) or 0  # another program may record none
    if submitted.get("refused") and not job_id:
        status.state, status.reason = "REFUSED", submitted["refused"]
    elif last and ends and job_id in (last.job_id, last.successor):
        status.state, status.reason = ended(run, last, ends)
        status.since = stamp(ends.ended or ends.began)
        status.hosts = "" if status.state == "PENDING" else status.hosts  # the next may differ
    elif job_id:
        status.state, status.since = "PENDING", stamp(submitted["submitted"])
    elif submitted:
        status.state, status.reason = "LOST", "sbatch did not answer, and no job has this name"
    else:
        record.read(run)  # raises if the run was removed meanwhile
    return status


def policy(job: JobRecord) -> str:
    """When a job is requeued, and how its command starts then."""
    returns = in_words(Policy.of(job.spec.get("requeue", {})))
    if not job.spec.get("command"):
        return returns
    own = job.spec.get("resume_command")
    again = (
        "later attempts run resume_command"
        if own
        else "later attempts run the same command, which must load its checkpoint (attach does)"
    )
    return f"{returns}; {again}"


def in_words(policy: Policy) -> str:
    """A policy in one line."""
    if not policy.enabled:
        return "is never requeued: requeue.enabled is false"
    idle = decision.CAUSES[decision.TIMEOUT].idle
    limits = [counted(policy.crashes, "crash", "crashes"), counted(policy.hangs, "hang")]
    limits += [] if policy.timeouts else [f"{idle} time limits in a row"]
    ends = " or ".join(limits) + " without progress"
    ends += f", or {counted(policy.timeouts, 'time limit')}" if policy.timeouts else ""
    return f"is requeued after preemptions, node failures and time limits; ends after {ends}"


def ended(run: RunDir, last: ledger.Attempt, ends: ledger.Attempt) -> tuple[str, str]:
    """A run's state after its last attempt, and the reason.

    Args:
        ends: the attempt whose end is the run's; see refused_resume.py.
    """
    if last.cause is None:
        return "RUNNING", ""
    if last.action in decision.WAITS:
        return "PENDING", f"requeued ({last.cause})"
    if last.action == decision.HERE:
        return "RUNNING", f"starts again in its allocation ({last.cause})"
    state, why = _over(run, ends)
    if ends is not last:
        why = "; ".join(
            filter(None, (why, f"its resume was refused: {first_failure.of(run, last)}"))
        )
    return state, why


def _over(run: RunDir, last: ledger.Attempt) -> tuple[str, str]:
    """The state after an attempt that no other one follows, and the reason."""
    waited = last.action in decision.WAITS  # until a person resumed the run
    if waited and last.exit_code is not None:
        return "CANCELLED", "while it waited to be requeued"
    state = STATES.get(last.cause or "", "LOST" if waited else "FAILED")
    failed = first_failure.of(run, last) if state in ("FAILED", "OUT_OF_MEMORY") else ""
    return state, "; ".join(filter(None, (failed, last.reason)))


def progress(run: RunDir, number: int, status: Status) -> None:
    """Fill in step, epoch, loss and metrics from the two ends of the metrics file."""
    metrics = run.attempt(number).metrics
    for line in itertools.islice(read_lines(metrics), 2):  # the rank map and the start
        status.total_steps = whole(line.get("total_steps")) or status.total_steps
    for line in reversed(last_lines(metrics, TAIL)):
        # A checkpoint is recorded some steps later, with its own step.
        status.step = max(status.step, whole(line.get("step")))
        status.epoch = status.epoch or whole(line.get("epoch"))
        loss, metrics = line.get("loss"), line.get("metrics")
        if line.get("event") == "train" and status.loss is None and isinstance(loss, int | float):
            status.loss = loss
        if line.get("event") in ("eval", "log") and isinstance(metrics, dict):
            status.metrics = status.metrics or metrics


def whole(value: object) -> int:
    """An integer of a record, or 0: a program may write any value there."""
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def stamp(seconds: float) -> str:
    """A time for programs."""
    return times.iso(seconds)
