"""Status: what can be said of a run now.

What is known lies in the run dir; a backend is asked only about a run that has not ended there.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcddp import record
from hpcddp.attempt import decision, first_failure, ledger, log_reader, refused_resume
from hpcddp.errors import RunError, SlurmUnreachable
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, last_lines, read_json, read_lines, runs_in
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.commands import QueuedJob
from hpcddp.submit.backends import BACKENDS

# Why the last attempt ended -> the run's state, where it does not come back; the rest is FAILED.
STATES = {
    decision.DONE: "COMPLETED",
    decision.ASKED: "STOPPED",
    decision.CANCELLED: "CANCELLED",
    decision.TIMEOUT: "TIMEOUT",
    decision.PREEMPTED: "PREEMPTED",
    decision.SIGNALLED: "STOPPED",
    decision.NODE: "NODE_FAIL",
    decision.OOM: "OUT_OF_MEMORY",
}
# Nobody has told of a job, but one may have the run's name.
UNTOLD = ("LOST", "RENDERED")
REQUESTS = {"stop": "STOPPED", "cancel": "CANCELLED"}
FINAL = {
    "COMPLETED", "STOPPED", "CANCELLED", "FAILED", "REFUSED", "TIMEOUT", "NODE_FAIL", "PREEMPTED",
    "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "LOST", "RENDERED", "DAMAGED",
}  # fmt: skip
TAIL = 1 << 16  # bytes of the metrics file that status reads
ELEMENT = re.compile(r"_\d+$")  # of the id of an array's element

# Slurm's reason for a job that waits until it is released -> why; squeue writes some with spaces,
# scontrol with underscores. The first that matches.
HELD = (
    ("JobHeldAdmin", "an administrator holds it, and one has to run"),
    ("JobHeldUser", "it is held until you run"),
    ("JobHoldMaxRequeue", "Slurm holds it, since its start failed too often, until you run"),
    ("launch.failed.*held", "Slurm holds it, since its start failed on a node, until you run"),
    (".*held.*", "Slurm holds it until you run"),
)


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
    policy: str = ""  # when it comes back
    stale: bool = False  # Slurm did not answer: this is the last known state
    refused: bool = False  # the newest resume was refused: this is the state before it

    @property
    def final(self) -> bool:
        return self.state in FINAL

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        return {"schema_version": 1, **asdict(self), "log": f"{self.path}/log"}


def current(run: RunDir) -> str | None:
    """The newest job of a run; None if it was rendered or refused only."""
    submitted = read_json(run.submission) or {}
    last = ledger.last(run)
    if last and last.began > submitted.get("submitted", 0.0):
        return last.successor or last.job_id
    return submitted.get("job_id")


def status(run: RunDir, queue: Callable[[], list[QueuedJob]] | None = None) -> Status:
    """The state of a run; a run that lives is looked up at its backend.

    Args:
        queue: gives the rows of all jobs on Slurm, so that many runs need one question.
    """
    return asked(run, known(run), queue)


def asked(run: RunDir, found: Status, queue: Callable[[], list[QueuedJob]] | None = None) -> Status:
    """The same, where it is known already what the run dir says."""
    if found.final and found.state not in UNTOLD:
        return found
    try:
        row = find_row(run, found, queue)
    except SlurmUnreachable as error:
        if found.state != "RENDERED":
            found.stale, found.reason = True, error.what
        return found
    if row is None or not row.live:  # it may have ended between the two looks
        found = known(run)
        if row is None or (found.final and found.state not in UNTOLD):
            return found if found.final else gone(run, found)
    found.state, found.hosts, found.job_id = row.state, row.hosts or found.hosts, row.job_id
    found.reason = "" if row.reason == "None" or row.state == "CANCELLED" else explained(row)
    since = row.submitted if row.state == "PENDING" else row.start
    found.since = stamp(since) if since else found.since
    return found


def explained(row: QueuedJob) -> str:
    """Slurm's reason for a job's state; of one that is held also the command that lets it go."""
    why = next((words for pattern, words in HELD if re.fullmatch(pattern, row.reason)), "")
    return f"{row.reason}: {why} scontrol release {row.job_id}" if why else row.reason


def find_row(
    run: RunDir, found: Status, queue: Callable[[], list[QueuedJob]] | None
) -> QueuedJob | None:
    """The row of a run's job: by id, or by name and folder where sbatch never told the id."""
    if found.backend != "slurm":
        return BACKENDS[found.backend].look(run, found.job_id) if found.job_id else None
    rows = rows_of(run, queue() if queue else slurm.queue(name=record.read(run).name))
    row = next((r for r in rows if r.job_id == found.job_id), None)
    return row if row and row.live else next((r for r in rows if r.live), row)


def rows_of(run: RunDir, rows: Iterable[QueuedJob]) -> list[QueuedJob]:
    """Of some jobs those of a run, newest first: by the ids that it knows, or by name and folder.

    A rendered script may lie anywhere: then the name is the run's own, and the command names no
    other run. An array's elements have run dirs of their own, and the name and command of their
    array.
    """
    name, ids = record.read(run).name, job_ids(run)

    def ours(row: QueuedJob) -> bool:
        if row.name != name:
            return False
        mine = row.is_in(str(run.path)) or (name == run.name and not row.is_in_any())
        return row.job_id in ids or (mine and not ELEMENT.search(row.job_id))

    return [row for row in rows if ours(row)]


def job_ids(run: RunDir) -> set[str]:
    """Every job that has worked on a run, or waits to, as far as its folder knows."""
    submitted = read_json(run.submission) or {}
    known = {name for a in ledger.attempts(run) for name in (a.job_id, a.successor) if name}
    return known | {str(submitted.get("job_id"))}


def status_all(root: Path) -> list[Status]:
    """The state of all runs of a folder, newest first, with one question to Slurm."""
    queue = once(slurm.queue)
    return [checked(run, queue) for run in runs_in(root)]


def once(ask: Callable[[], list[QueuedJob]]) -> Callable[[], list[QueuedJob]]:
    """A question that is asked when its answer is first wanted, and not again."""
    said: list[list[QueuedJob] | SlurmUnreachable] = []

    def answer() -> list[QueuedJob]:
        if not said:
            try:
                said.append(ask())
            except SlurmUnreachable as error:
                said.append(error)
        if isinstance(said[0], SlurmUnreachable):
            raise said[0]
        return said[0]

    return answer


def checked(run: RunDir, queue: Callable[[], list[QueuedJob]]) -> Status:
    """The status of one run among others: a damaged folder must not hide the rest."""
    try:
        return status(run, queue)
    except RunError as error:
        path = str(run.path)
        return Status(run.name, "DAMAGED", path, None, "", "", 0, 0.0, 0, reason=error.what)


def gone(run: RunDir, found: Status) -> Status:
    """A job that left no end and that its backend does not know any more."""
    want, last = (read_json(run.request) or {}).get("want", ""), ledger.last(run)
    told = log_reader.ending_of(last) if last and last.live else ""
    if want in REQUESTS:
        found.state, found.reason = REQUESTS[want], ""
    elif last and last.action in decision.RETURNS:
        found.state, found.reason = "CANCELLED", "while it waited to come back"
    elif told:
        found.state, found.reason = STATES.get(told, "LOST"), ""
    else:
        found.state = "LOST"
        found.reason = "the job is gone and left no word; its log may tell"
    return found


def known(run: RunDir) -> Status:
    """What the run dir alone says."""
    job = record.read(run)
    submitted = read_json(run.submission) or {}
    job_id = current(run)
    low, high = job.nodes
    found = Status(
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
        found.attempt, found.hosts, found.since = last.number, ends.nodes, stamp(ends.began)
        found.refused = ends is not last
        progress(run, ends.number, found)
    if submitted.get("refused") and not job_id:
        found.state, found.reason = "REFUSED", submitted["refused"]
    elif last and ends and job_id in (last.job_id, last.successor):
        found.state, found.reason = ended(run, last, ends)
        found.since = stamp(ends.ended or ends.began)
    elif job_id:
        found.state, found.since = "PENDING", stamp(submitted["submitted"])
    elif submitted:
        found.state, found.reason = "LOST", "sbatch did not answer, and no job has the run's name"
    else:
        record.read(run)  # it may be removed just now: then nothing of this is so
    return found


def policy(job: JobRecord) -> str:
    """When a job comes back, and how a program begins then."""
    told = decision.Policy.of(job.spec.get("requeue", {})).in_words()
    if not job.spec.get("command"):
        return told
    again = "later attempts run resume_command" if job.spec.get("resume_command") else "begins anew"
    return f"{told}; {again}"


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
    """The state after an attempt that nobody brings back, and the reason."""
    waited = last.action in decision.RETURNS  # and a person resumed the run
    if waited and last.exit_code is not None:
        return "CANCELLED", "while it waited to come back"
    state = STATES.get(last.cause or "", "LOST" if waited else "FAILED")
    failed = first_failure.of(run, last) if state in ("FAILED", "OUT_OF_MEMORY") else ""
    return state, "; ".join(filter(None, (failed, last.reason)))


def progress(run: RunDir, number: int, found: Status) -> None:
    """Fill in step, epoch, loss and metrics from the two ends of the metrics file."""
    metrics = run.attempt(number).metrics
    for line in itertools.islice(read_lines(metrics), 2):  # the rank map and the start
        found.total_steps = whole(line.get("total_steps")) or found.total_steps
    for line in reversed(last_lines(metrics, TAIL)):
        found.step = max(found.step, whole(line.get("step")))  # a save is told some steps later
        found.epoch = found.epoch or whole(line.get("epoch"))
        loss, metrics = line.get("loss"), line.get("metrics")
        if line.get("event") == "train" and found.loss is None and isinstance(loss, int | float):
            found.loss = loss
        if line.get("event") in ("eval", "log") and isinstance(metrics, dict):
            found.metrics = found.metrics or metrics


def whole(told: object) -> int:
    """A whole number of a record; 0 for what is none: a program may write what it likes."""
    return told if isinstance(told, int) and 0 <= told < 1 << 62 else 0


def stamp(seconds: float) -> str:
    """Local time as Slurm writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))
