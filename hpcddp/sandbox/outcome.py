"""Rehearsal: its outcome, fault by fault and as a whole."""

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
    """The outcome of one fault."""

    fault: str
    step: int  # at which it came; 0 in a start-up; without steps, tenths of a second
    attempt: int  # that it hit; 0 if it could not be played
    cause: str  # of the attempt's end, as the run recorded it
    survived: bool
    steps_lost: int
    seconds_lost: float | None  # from the last step before it to the first one after it
    reason: str = ""  # why it was not survived


@dataclass
class Report:
    """The outcome of a rehearsal."""

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
    weights_equal: bool | None = False  # None: the program does not say
    order_equal: bool | None = False
    difference: str = ""  # the first, where the order is not equal
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the run survived all faults, lost no step needlessly, and has the same result."""
        alive = all(fault.survived for fault in self.faults) and self.state == "COMPLETED"
        same = self.weights_equal is not False and self.order_equal is not False
        return alive and not self.steps_needless and same

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        return {"schema_version": 1, **asdict(self), "passed": self.passed}


def outcomes(run: RehearsedRun, drawn: list[Fault]) -> list[FaultOutcome]:
    """The outcome of each fault."""
    lost = compare.lost(run.folder)
    attempts = {summary.attempt: summary for summary in history.summaries(run.folder)}
    return [_outcome(run, fault, lost.get(fault.attempt, 0), attempts) for fault in drawn]


def _outcome(
    run: RehearsedRun,
    fault: Fault,
    lost: int,
    attempts: Mapping[int, history.AttemptSummary],
) -> FaultOutcome:
    if not fault.attempt:
        reason = "the run had ended before"
        return FaultOutcome(fault.kind, fault.step, 0, "", False, 0, None, reason)
    hit = attempts[fault.attempt]
    later = [n for n in run.first_steps if n > fault.attempt]
    done = any(each.cause == "done" for n, each in attempts.items() if n >= fault.attempt)
    allowed = max(0, hit.last - hit.saved) if KINDS[fault.kind] else 0
    reason = fault.failed
    if not later and not done:
        reason = reason or f"it did not train again: {hit.cause}; {hit.action} {hit.reason}".strip()
    elif lost > allowed:
        reason = reason or f"{lost - allowed} steps more than it must cost"
    return FaultOutcome(
        fault.kind, fault.at, fault.attempt, hit.cause or "", not reason, lost,
        _seconds(run, fault, later), reason,
    )  # fmt: skip


def _seconds(run: RehearsedRun, fault: Fault, later: list[int]) -> float | None:
    """From the last step of the attempt that was hit to the first step after it."""
    if not later:
        return None
    last = read_step(run.folder.attempt(fault.attempt))[1] or fault.when
    return max(0.0, run.first_steps[min(later)][1] - last)
