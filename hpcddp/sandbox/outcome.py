"""Rehearsal: what came of it, fault by fault and as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcddp.observe import history
from hpcddp.rundir import read_step
from hpcddp.sandbox import compare
from hpcddp.sandbox.fault_times import KINDS, Fault
from hpcddp.sandbox.rehearsed_run import RehearsedRun


@dataclass
class FaultOutcome:
    """What came of one fault."""

    fault: str
    step: int  # at which it came; 0 in a start-up; without steps, tenths of a second
    attempt: int  # that it hit; 0 if it could not be played
    cause: str  # that the run itself found
    survived: bool
    steps_lost: int
    seconds_lost: float | None  # from the last step before it to the first one after it
    reason: str = ""  # why it was not survived


@dataclass
class Report:
    """What came of a rehearsal."""

    job: str
    seed: int
    nodes: int
    gpus: int
    steps: int  # of the undisturbed run
    faults: list[FaultOutcome] = field(default_factory=list)
    state: str = ""  # of the run with the faults
    reason: str = ""
    steps_lost: int = 0
    steps_needless: int = 0  # of these, lost for no good reason
    weights_equal: bool | None = False  # None: a program that tells nothing of it
    order_equal: bool | None = False
    difference: str = ""  # the first, where the order is not equal
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all was survived, nothing was lost in vain, and the result is the same."""
        alive = all(row.survived for row in self.faults) and self.state == "COMPLETED"
        same = self.weights_equal is not False and self.order_equal is not False
        return alive and not self.steps_needless and same

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        return {"schema_version": 1, **asdict(self), "passed": self.passed}


def rows(rehearsed: RehearsedRun, drawn: list[Fault]) -> list[FaultOutcome]:
    """What came of each fault."""
    lost = compare.lost(rehearsed.run)
    known = {row.attempt: row for row in history.rows(rehearsed.run)}
    return [_row(rehearsed, fault, lost.get(fault.attempt, 0), known) for fault in drawn]


def _row(
    rehearsed: RehearsedRun, fault: Fault, lost: int, known: Mapping[int, history.AttemptSummary]
) -> FaultOutcome:
    if not fault.attempt:
        reason = "the run had ended before"
        return FaultOutcome(fault.kind, fault.step, 0, "", False, 0, None, reason)
    hit = known[fault.attempt]
    later = [n for n in rehearsed.first_steps if n > fault.attempt]
    done = any(row.cause == "done" for n, row in known.items() if n >= fault.attempt)
    may = max(0, hit.last - hit.saved) if KINDS[fault.kind] else 0
    reason = fault.failed
    if not later and not done:
        reason = reason or f"it did not train again: {hit.cause}; {hit.action} {hit.reason}".strip()
    elif lost > may:
        reason = reason or f"{lost - may} steps more than it must cost"
    return FaultOutcome(
        fault.kind, fault.at, fault.attempt, hit.cause or "", not reason, lost,
        _seconds(rehearsed, fault, later), reason,
    )  # fmt: skip


def _seconds(rehearsed: RehearsedRun, fault: Fault, later: list[int]) -> float | None:
    """From the last step of the life that was hit to the first step after it."""
    if not later:
        return None
    last = read_step(rehearsed.run.attempt(fault.attempt))[1] or fault.when
    return max(0.0, rehearsed.first_steps[min(later)][1] - last)
