"""Rehearsal: its outcome, for each fault and as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcddp.observe import history
from hpcddp.rundir import read_step
from hpcddp.sandbox import compare
from hpcddp.sandbox.fault_times import KINDS, Fault
from hpcddp.sandbox.rehearsed_run import RehearsedRun
from hpcddp.sizes import counted


@dataclass
class FaultOutcome:
    """The outcome of one fault."""

    fault: str
    step: int  # 0 during the start of an attempt; without steps, tenths of a second
    attempt: int  # that it hit; 0 if it could not happen
    cause: str  # of the attempt's end, as the run recorded it
    survived: bool
    steps_lost: int | None  # None: unknown, since no attempt with steps followed
    seconds_lost: float | None  # from the last step before it to the first one after it
    reason: str = ""  # why the run did not survive it


@dataclass
class Report:
    """The outcome of a rehearsal."""

    job: str
    seed: int
    nodes: int
    gpus: int
    steps: int  # of the run without faults
    faults: list[FaultOutcome] = field(default_factory=list)
    state: str = ""  # of the run with the faults
    reason: str = ""
    steps_lost: int | None = None  # None: unknown, without steps or an end
    steps_needless: int = 0  # of these, more than the faults explain
    steps_repeated: int = 0  # that were in flight at a fault: they had changed nothing
    weights_equal: bool | None = False  # None: the program does not record them
    order_equal: bool | None = False
    difference: str = ""  # the first one, where the order is not equal
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the run survived all faults, lost no needless steps, and has the same result."""
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
    return [_outcome(run, fault, lost, attempts) for fault in drawn]


def _outcome(
    run: RehearsedRun,
    fault: Fault,
    lost_of: Mapping[int, int],
    attempts: Mapping[int, history.AttemptSummary],
) -> FaultOutcome:
    if not fault.attempt:
        reason = "the run ended before this fault"
        return FaultOutcome(fault.kind, fault.step, 0, "", False, None, None, reason)
    hit = attempts[fault.attempt]
    later = [n for n in run.first_steps if n > fault.attempt]
    done = any(each.cause == "done" for n, each in attempts.items() if n >= fault.attempt)
    # Attempts that had no time to save.
    ended = {fault.attempt} if KINDS[fault.kind] else set[int]()
    ended |= {fault.second_attempt} & attempts.keys()
    allowed = sum(max(0, attempts[n].last - attempts[n].saved) for n in ended)
    lost = sum(lost_of.get(n, 0) for n in ended | {fault.attempt})
    reason = fault.failed
    if not later and not done:
        reason = reason or f"no training after it: {hit.cause}; {hit.action} {hit.reason}".strip()
    elif lost > allowed:
        reason = reason or f"{counted(lost - allowed, 'step')} lost needlessly"
    return FaultOutcome(
        fault.kind, fault.at, fault.attempt, hit.cause or "", not reason,
        None if run.clock or not (later or done) else lost, _seconds(run, fault, later), reason,
    )  # fmt: skip


def _seconds(run: RehearsedRun, fault: Fault, later: list[int]) -> float | None:
    """Seconds from the last step of the attempt that was hit to the next step."""
    if not later:
        return None
    last = read_step(run.folder.attempt(fault.attempt))[1] or fault.when
    return max(0.0, run.first_steps[min(later)][1] - last)
