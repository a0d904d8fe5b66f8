"""Step 13: the attempts of a run, from its folder alone: their causes and their lost steps."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

from hpcddp.attempt import decision, first_failure, ledger, log_reader
from hpcddp.attempt.error_record import is_peer
from hpcddp.attempt.first_failure import Failed
from hpcddp.attempt.ledger import Attempt
from hpcddp.observe import lost_steps, recovery
from hpcddp.observe.recovery import Recovery
from hpcddp.rundir import AttemptDir, RunDir, last_lines, read_json, read_lines, read_step
from hpcddp.submit.status import whole

TAIL = 1 << 16  # bytes of the metrics file that are read
NODES = "node"  # the kind of a failure of all ranks of a host
CALM = {name for name, row in decision.CAUSES.items() if row.calm}
OWN = ("done", "stopped", "cancelled")  # ends that need no explanation


@dataclass
class AttemptSummary:
    """One attempt.

    ``lost`` counts optimizer steps that a later attempt repeated, or would have to repeat.
    """

    attempt: int
    job_id: str
    hosts: str
    began: float  # seconds since the epoch
    ended: float | None  # its last sign of life, where its script could not record the end
    cause: str | None  # None while it runs
    by: str  # the cause of its stop: a signal, the time limit, a person
    first: int  # step after which it began
    last: int  # its last step
    saved: int  # step of the newest complete checkpoint at its end
    lost: int
    safe_s: float | None  # seconds from the first signal to a complete checkpoint
    action: str
    reason: str
    error: dict[str, Any] | None  # of the rank that failed first: its record, or taken from the log
    recovery: Recovery | None = None  # how the next attempt continued in place
    lost_why: str = ""  # if a rank failed, and no other one saved its newest step

    @property
    def done(self) -> int:
        """Optimizer steps of this attempt."""
        return self.last - self.first

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        words = str(self.recovery or "")
        return {**asdict(self), "done": self.done, "recovered": words}


def summaries(
    run: RunDir, *, over: bool = False, kept: dict[int, AttemptSummary] | None = None
) -> list[AttemptSummary]:
    """The attempts, oldest first.

    Args:
        kept: summaries of earlier calls, for repeated calls: an attempt that has ended is read
            once.
        over: no process of the run is left. A killed script recorded no end of its attempt; then
            Slurm's lines in its log show it.
    """
    kept = {} if kept is None else kept
    folders = [folder for folder in run.all_attempts() if folder.number not in kept]
    attempts = [facts for folder in folders if (facts := ledger.read(folder))]
    if over and attempts and attempts[-1].live:
        last = attempts[-1]
        last.cause = log_reader.ending_of(last) or decision.UNKNOWN
        last.action, last.saved = decision.NONE, ledger.newest_step(run)
    new = [_summary(run, facts, gone=over or facts is not attempts[-1]) for facts in attempts]
    ordered = sorted([*kept.values(), *new], key=lambda summary: summary.attempt)
    kept.update((summary.attempt, summary) for summary in ordered[:-1] if summary.cause)
    _recover(run, ordered)
    for i, summary in enumerate(ordered):
        # An attempt that never trained repeats no step.
        later = next((each for each in ordered[i + 1 :] if each.last), None)
        summary.lost = 0
        if later:
            summary.lost = max(0, summary.last - later.first)
        elif summary.cause not in (None, "done"):
            summary.lost = max(0, summary.last - summary.saved)
        summary.lost_why = lost_steps.why(run, summary.attempt, summary.cause, summary.lost)
    return ordered


def _recover(run: RunDir, ordered: list[AttemptSummary]) -> None:
    """Fill in how attempts continued in place, once that is known."""
    for one, two in itertools.pairwise(ordered):
        known = one.recovery and (one.recovery.done or two.cause)
        if one.action == decision.HERE and not known:
            before, following = (ledger.read(run.attempt(x.attempt)) for x in (one, two))
            if before and following:
                one.recovery = recovery.after(run, before, following)


def _summary(run: RunDir, facts: Attempt, gone: bool) -> AttemptSummary:
    start: dict[str, Any] = {}
    folder = run.attempt(facts.number)
    for line in itertools.islice(read_lines(folder.metrics), 4):
        start = line if line.get("event") == "start" else start
    tail = last_lines(folder.metrics, TAIL)
    end: dict[str, Any] = next((line for line in reversed(tail) if line.get("event") == "end"), {})
    asked, stopped = end.get("asked"), end.get("time")
    timed = isinstance(asked, int | float) and isinstance(stopped, int | float)
    return AttemptSummary(
        facts.number, facts.job_id, facts.nodes, facts.began,
        _ended(facts, folder, gone), facts.cause,
        by=str(end.get("by", "")),
        first=whole(start.get("step")),
        last=max(read_step(folder)[0], *(whole(line.get("step")) for line in tail), 0),
        saved=_last_saved(start, tail) if facts.saved is None else facts.saved,
        lost=0,
        safe_s=max(0.0, stopped - asked) if timed and asked else None,
        action=facts.action,
        reason=facts.reason,
        error=_error(run, facts),
    )  # fmt: skip


def _last_saved(start: dict[str, Any], tail: list[dict[str, Any]]) -> int:
    """The newest saved step, by the records of the ranks."""
    saves = [line for line in tail if line.get("event") == "checkpoint"]
    return max(whole(line.get("step")) for line in (start, *saves))


def _ended(facts: Attempt, folder: AttemptDir, gone: bool) -> float | None:
    """When an attempt ended.

    Where its script was killed, or its node failed, the next attempt recorded the end, perhaps
    days later, or nothing did.
    """
    if None not in (facts.ended, facts.exit_code) or not (gone or facts.cause):
        return facts.ended
    _, last_sign = read_step(folder)
    with contextlib.suppress(OSError):
        last_sign = last_sign or folder.log.stat().st_mtime
    return max(facts.began, min(last_sign, facts.ended or math.inf))


def _error(run: RunDir, facts: Attempt) -> dict[str, Any] | None:
    """The record of the rank that failed first, or one made from its log; None if none failed.

    Where the log does not name that rank, it is the record of a rank that lost its peer.
    """
    error = read_json(run.attempt(facts.number).error)
    if (error and not is_peer(error)) or facts.cause in CALM:
        return error
    if facts.live and not error:
        return None  # it still runs: an error in its log may be harmless
    first = first_failure.failed(run, facts.number)
    return _as_record(first) if first else error


def _as_record(failed: Failed) -> dict[str, Any]:
    """A record in the form that ranks write."""
    return {
        "rank": failed.rank,
        "host": failed.host,
        "type": "",
        "kind": NODES if failed.rank is None else "crash",
        "message": failed.what.removeprefix(":").strip(),
        "traceback": str(failed),
    }
