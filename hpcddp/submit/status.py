"""Status: the state of a run now, and how far it is.

Most of it lies in the run dir. A backend is asked only about a run that has not ended there; which
of its jobs are the run's is the affair of run_jobs.py.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcddp import record
from hpcddp.attempt import decision, first_failure, ledger, log_reader, refused_resume
from hpcddp.attempt.decision import Policy
from hpcddp.errors import RunError, SlurmUnreachable
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, last_lines, read_json, read_lines, runs_in
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.commands import QueuedJob
from hpcddp.submit.run_jobs import current, explained, find_row

# Why the last attempt ended -> the run's state, where it does not come back; the rest is FAILED.
STATES = {name: row.state for name, row in decision.CAUSES.items() if row.state}
# The run dir names no job, but one of the run's name may exist.
UNTOLD = ("LOST", "RENDERED")
REQUESTS = {"stop": "STOPPED", "cancel": "CANCELLED"}
FINAL = {
    "COMPLETED", "STOPPED", "CANCELLED", "FAILED", "REFUSED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
    "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "LOST", "RENDERED", "DAMAGED",
}  # fmt: skip
TAIL = 1 << 16  # bytes of the metrics file that status reads


@dataclass
class Status:
    """The state of a run now, and how far it is."""

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
    policy: str = ""  # when it comes back
    stale: bool = False  # Slurm did not answer: this is the last known state
    refused: bool = False  # the newest resume was refused: this is the state before it

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        return {"schema_version": 1, **asdict(self), "log": f"{self.path}/log"}


def status(run: RunDir, queue: Callable[[], list[QueuedJob]] | None = None) -> Status:
    """The state of a run; a run that lives is looked up at its backend.

    Args:
        queue: gives the rows of all jobs on Slurm, so that many runs need one question.
    """
    return asked(run, known(run), queue)


def asked(
    run: RunDir, status: Status, queue: Callable[[], list[QueuedJob]] | None = None
) -> Status:
    """The same from the status that the run dir gives."""
    if status.final and status.state not in UNTOLD:
        return status
    try:
        row = find_row(run, status.backend, status.job_id, queue)
    except SlurmUnreachable as error:
        if status.state != "RENDERED":
            status.stale, status.reason = True, error.what
        return status
    if row is None or not row.live:  # it may have ended between the two looks
        status = known(run)
        if row is None or (status.final and status.state not in UNTOLD):
            return status if status.final else gone(run, status)
    return _seen(status, row)


def _seen(status: Status, row: QueuedJob) -> Status:
    """The status with the facts of the job's row."""
    status.state, status.hosts, status.job_id = row.state, row.hosts or status.hosts, row.job_id
    status.reason = "" if row.reason == "None" or row.state == "CANCELLED" else explained(row)
    since = row.submitted if row.state == "PENDING" else row.start
    status.since = stamp(since) if since else status.since
    return status


def status_all(root: Path) -> list[Status]:
    """The state of all runs of a folder, newest first, with one question to Slurm."""
    queue = once(slurm.queue)
    return [checked(run, queue) for run in runs_in(root)]


def once(ask: Callable[[], list[QueuedJob]]) -> Callable[[], list[QueuedJob]]:
    """A function that asks when it is first called, and keeps the answer, or the error."""
    answers: list[list[QueuedJob] | SlurmUnreachable] = []

    def answer() -> list[QueuedJob]:
        if not answers:
            try:
                answers.append(ask())
            except SlurmUnreachable as error:
                answers.append(error)
        if isinstance(answers[0], SlurmUnreachable):
            raise answers[0]
        return answers[0]

    return answer


def checked(run: RunDir, queue: Callable[[], list[QueuedJob]]) -> Status:
    """The status of one run among others: a damaged folder must not hide the rest."""
    try:
        return status(run, queue)
    except RunError as error:
        path = str(run.path)
        return Status(run.name, "DAMAGED", path, None, "", "", 0, 0.0, 0, reason=error.what)


def gone(run: RunDir, status: Status) -> Status:
    """The status of a job whose end is not recorded and which its backend no longer knows."""
    want, last = (read_json(run.request) or {}).get("want", ""), ledger.last(run)
    cause = log_reader.ending_of(last) if last and last.live else ""
    if want in REQUESTS:
        status.state, status.reason = REQUESTS[want], ""
    elif last and last.action in decision.RETURNS:
        status.state, status.reason = "CANCELLED", "while it waited to come back"
    elif cause:
        status.state, status.reason = STATES.get(cause, "LOST"), ""
    else:
        status.state = "LOST"
        status.reason = "the job is gone and left no word; its log may tell"
    return status


def known(run: RunDir) -> Status:
    """The status by the run dir alone."""
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
    if submitted.get("refused") and not job_id:
        status.state, status.reason = "REFUSED", submitted["refused"]
    elif last and ends and job_id in (last.job_id, last.successor):
        status.state, status.reason = ended(run, last, ends)
        status.since = stamp(ends.ended or ends.began)
    elif job_id:
        status.state, status.since = "PENDING", stamp(submitted["submitted"])
    elif submitted:
        status.state, status.reason = "LOST", "sbatch did not answer, and no job has the run's name"
    else:
        record.read(run)  # it may be removed just now: then nothing of this is so
    return status


def policy(job: JobRecord) -> str:
    """When a job comes back, and how a program begins then."""
    returns = in_words(Policy.of(job.spec.get("requeue", {})))
    if not job.spec.get("command"):
        return returns
    again = "later attempts run resume_command" if job.spec.get("resume_command") else "begins anew"
    return f"{returns}; {again}"


def in_words(policy: Policy) -> str:
    """A policy in one line."""
    if not policy.enabled:
        return "stays ended, whatever ends it: requeue.enabled is false"
    idle = decision.CAUSES[decision.TIMEOUT].idle
    limits = [f"{policy.crashes} crashes", f"{policy.hangs} hangs"]
    limits += [] if policy.timeouts else [f"{idle} time limits in a row"]
    ends = " or ".join(limits) + " without progress"
    ends += f", or {policy.timeouts} time limits" if policy.timeouts else ""
    return f"comes back after preemptions, lost nodes and time limits; stays ended after {ends}"


def ended(run: RunDir, last: ledger.Attempt, ends: ledger.Attempt) -> tuple[str, str]:
    """A run's state after its last attempt, and the reason.

    Args:
        ends: the attempt whose end is the run's; see refused_resume.py.
    """
    if last.cause is None:
        return "RUNNING", ""
    if last.action in decision.RETURNS:
        return "PENDING", f"comes back after {last.cause}"
    state, why = _over(run, ends)
    if ends is not last:
        why = "; ".join(
            filter(None, (why, f"its resume was refused: {first_failure.of(run, last)}"))
        )
    return state, why


def _over(run: RunDir, last: ledger.Attempt) -> tuple[str, str]:
    """The state after an attempt that none follows by itself, and the reason."""
    waited = last.action in decision.RETURNS  # and a person resumed the run
    if waited and last.exit_code is not None:
        return "CANCELLED", "while it waited to come back"
    state = STATES.get(last.cause or "", "LOST" if waited else "FAILED")
    failed = first_failure.of(run, last) if state in ("FAILED", "OUT_OF_MEMORY") else ""
    return state, "; ".join(filter(None, (failed, last.reason)))


def progress(run: RunDir, number: int, status: Status) -> None:
    """Fill in step, epoch, loss and metrics from the two ends of the metrics file."""
    metrics = run.attempt(number).metrics
    for line in itertools.islice(read_lines(metrics), 2):  # the rank map and the start
        status.total_steps = whole(line.get("total_steps")) or status.total_steps
    for line in reversed(last_lines(metrics, TAIL)):
        # A save is recorded some steps later, under its own step.
        status.step = max(status.step, whole(line.get("step")))
        status.epoch = status.epoch or whole(line.get("epoch"))
        loss, metrics = line.get("loss"), line.get("metrics")
        if line.get("event") == "train" and status.loss is None and isinstance(loss, int | float):
            status.loss = loss
        if line.get("event") in ("eval", "log") and isinstance(metrics, dict):
            status.metrics = status.metrics or metrics


def whole(value: object) -> int:
    """A whole number of a record, or 0: a program may write any value there."""
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


def stamp(seconds: float) -> str:
    """Local time as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
