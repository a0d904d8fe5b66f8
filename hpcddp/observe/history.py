"""Step 13: what became of a run's attempts, from its folder alone: causes, and steps lost."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

from hpcddp.attempt import decision, first_failure, ledger, log_reader
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import AttemptDir, RunDir, last_lines, read_lines, read_step
from hpcddp.submit.status import whole

TAIL = 1 << 16  # bytes of the metrics file that are read
OWN = ("done", "stopped", "cancelled")  # ends that need no explanation


@dataclass
class AttemptSummary:
    """One attempt.

    ``lost`` counts optimizer steps that a later attempt took again, or would have to.
    """

    attempt: int
    job_id: str
    hosts: str
    began: float  # seconds since the epoch
    ended: float | None  # the last sign of it, where its script could not say when
    cause: str | None  # None while it works
    by: str  # what asked it to stop: a signal, the time limit, a person
    first: int  # step that it began after
    last: int  # step that it came to
    saved: int  # step of the newest complete checkpoint at its end
    lost: int
    safe_s: float | None  # seconds from the first signal to a complete checkpoint
    action: str
    reason: str
    error: dict[str, Any] | None  # what the first failing rank wrote down, or its log says of it

    @property
    def done(self) -> int:
        """Optimizer steps that it took."""
        return self.last - self.first

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "done": self.done}


def rows(
    run: RunDir, *, over: bool = False, kept: dict[int, AttemptSummary] | None = None
) -> list[AttemptSummary]:
    """The attempts, oldest first.

    Args:
        kept: rows of earlier calls, for who looks again and again: an attempt that has ended is
            read once.
        over: nothing of the run works any more: an attempt that left no end, since its script was
            killed, ended as Slurm wrote into its log.
    """
    kept = {} if kept is None else kept
    folders = [folder for folder in run.all_attempts() if folder.number not in kept]
    attempts = [facts for folder in folders if (facts := ledger.read(folder))]
    if over and attempts and attempts[-1].live:
        last = attempts[-1]
        last.cause = log_reader.ending_of(last) or decision.UNKNOWN
        last.action, last.saved = decision.NONE, ledger.newest_step(run)
    new = [_row(run, facts, gone=over or facts is not attempts[-1]) for facts in attempts]
    found = sorted([*kept.values(), *new], key=lambda row: row.attempt)
    kept.update((row.attempt, row) for row in found[:-1] if row.cause)
    for i, row in enumerate(found):
        # An attempt that never began to train takes no step again.
        later = next((r for r in found[i + 1 :] if r.last), None)
        row.lost = 0
        if later:
            row.lost = max(0, row.last - later.first)
        elif row.cause not in (None, "done"):
            row.lost = max(0, row.last - row.saved)
    return found


def _row(run: RunDir, facts: Attempt, gone: bool) -> AttemptSummary:
    start: dict[str, Any] = {}
    folder = run.attempt(facts.number)
    for line in itertools.islice(read_lines(folder.metrics), 4):
        start = line if line.get("event") == "start" else start
    tail = last_lines(folder.metrics, TAIL)
    end: dict[str, Any] = next((line for line in reversed(tail) if line.get("event") == "end"), {})
    asked, told = end.get("asked"), end.get("time")
    timed = isinstance(asked, int | float) and isinstance(told, int | float)
    return AttemptSummary(
        facts.number, facts.job_id, facts.nodes, facts.began,
        _ended(facts, folder, gone), facts.cause,
        by=str(end.get("by", "")),
        first=whole(start.get("step")),
        last=max(read_step(folder)[0], *(whole(line.get("step")) for line in tail), 0),
        saved=_told(start, tail) if facts.saved is None else facts.saved,
        lost=0,
        safe_s=max(0.0, told - asked) if timed and asked else None,
        action=facts.action,
        reason=facts.reason,
        error=first_failure.error_of(run, facts),
    )  # fmt: skip


def _told(start: dict[str, Any], tail: list[dict[str, Any]]) -> int:
    """The newest step that was saved, as the ranks tell it."""
    saves = [line for line in tail if line.get("event") == "checkpoint"]
    return max(whole(line.get("step")) for line in (start, *saves))


def _ended(facts: Attempt, folder: AttemptDir, gone: bool) -> float | None:
    """When an attempt ended.

    Its script may have been killed, or its node: then the next attempt closed it, days later maybe,
    or nobody did.
    """
    if None not in (facts.ended, facts.exit_code) or not (gone or facts.cause):
        return facts.ended
    _, told = read_step(folder)
    with contextlib.suppress(OSError):
        told = told or folder.log.stat().st_mtime
    return max(facts.began, min(told, facts.ended or math.inf))
