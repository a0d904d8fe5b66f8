"""Step 12: what follows the end of an attempt.

``decide`` is a pure function: from the ranks' exit code, what Slurm says, the history and the
job's policy to a cause and an action. It never revives what a person ended: a job that Slurm ends
is only followed when Slurm's own words say that it was no person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hpcddp.attempt import exit_codes
from hpcddp.attempt.exit_codes import TERMINATED

# Causes: why an attempt ended.
DONE, ASKED, CANCELLED, PREEMPTED = "done", "stopped", "cancelled", "preempted"
TIMEOUT, SIGNALLED, NODE, REQUEUED = "time limit", "signalled", "node failure", "requeued"
CRASH, OOM, HANG, DIVERGED = "crash", "out of memory", "hang", "diverged"
MISTAKE, SUPERSEDED, REFUSED = "mistake", "superseded", "refused"
KILLED = "script killed"  # the batch script, by a SIGKILL that was not Slurm's
UNKNOWN = "unknown"

# Actions: what is done about it.
NONE = "none"  # it stays ended
AGAIN = "requeue"  # its batch script queues it again
FOLLOW = "follow-up"  # Slurm ends this job for good: a new one goes on
LEFT = "left to Slurm"  # Slurm has queued it again

RETURNS = (AGAIN, FOLLOW, LEFT)  # actions after which the run comes back

LOCAL = "LOCAL"  # the state of a job without a scheduler
_RUNS = ("RUNNING", "SIGNALING", LOCAL, "")  # "" is a controller that did not answer

# Why a job ended, by the state that Slurm gave it for good: what a person cancels is none of these.
OF_STATE = {"PREEMPTED": PREEMPTED, "TIMEOUT": TIMEOUT, "NODE_FAIL": NODE}

# Why an attempt ended, by the exit code of its ranks or by the kind of their failure, where that
# alone tells: see error_record.py.
OF_CODE = {exit_codes.DIVERGED: DIVERGED, exit_codes.HUNG: HANG}
OF_KIND = {
    "diverged": DIVERGED, "hang": HANG, "oom": OOM, "mistake": MISTAKE, "foreign": REFUSED,
    "damaged": MISTAKE,
}  # fmt: skip

# Which key of [requeue] limits the restarts after a cause; causes that are not here have no limit.
BUDGETS = {
    CRASH: "crashes", OOM: "crashes", KILLED: "crashes", HANG: "hangs", TIMEOUT: "timeouts",
}  # fmt: skip
# What Slurm ends a job for, where a new one goes on.
FOLLOWED = (PREEMPTED, TIMEOUT, NODE, KILLED)
# Restarts after which an attempt must have got somewhere, whatever its budget.
IDLE = {TIMEOUT: 3, SIGNALLED: 3}


class Policy(NamedTuple):
    """The job's [requeue] table."""

    enabled: bool = True
    crashes: int = 3
    hangs: int = 3
    timeouts: int = 0  # 0 is no limit

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Policy:
        """The policy in a job's table; other keys of it are not for this function."""
        return cls(**{name: table[name] for name in cls._fields if name in table})

    def in_words(self) -> str:
        """The policy in one line, for a person."""
        if not self.enabled:
            return "stays ended, whatever ends it: requeue.enabled is false"
        limits = [f"{self.crashes} crashes", f"{self.hangs} hangs"]
        limits += [] if self.timeouts else [f"{IDLE[TIMEOUT]} time limits in a row"]
        ends = " or ".join(limits) + " without progress"
        ends += f", or {self.timeouts} time limits" if self.timeouts else ""
        return f"comes back after preemptions, lost nodes and time limits; stays ended after {ends}"


class End(NamedTuple):
    """What is known when the ranks have left."""

    code: int  # of the rank that failed first, or the launcher's
    state: str = "RUNNING"  # the job's, as Slurm says it
    requeued: bool = False  # Slurm has queued it again
    preempted: bool = False  # Slurm notes a preemption of this life
    ending: str = ""  # why Slurm ends the job, in its own words: a cause
    grace: bool = False  # a preemption of this site gives time before it ends the job
    want: str = ""  # a person's request: stop, cancel, preempt
    kind: str = ""  # of the failure that a rank wrote down; "peer" is of no cause
    late: bool = False  # the time limit was near
    progress: bool = False  # a complete checkpoint is newer than at the attempt's start
    killed: bool = False  # a SIGKILL ended the batch script, and Slurm says that it was not its own
    program: bool = False  # the job is a program, and does not say that it has come to its end
    left: int | None = None  # the exit code of a program's ranks that saved and left, as they say
    own_signal: int = TERMINATED  # the exit code of a rank that the job's own stop signal ends
    warned: bool = False  # Slurm has warned of the time limit, as the job asks it to


class Past(NamedTuple):
    """What counts of an earlier attempt."""

    cause: str
    progress: bool


class Decision(NamedTuple):
    """Why an attempt ended, what is done, and why that."""

    cause: str
    action: str
    reason: str = ""


def decide(end: End, history: Sequence[Past], policy: Policy) -> Decision:
    """What to do when an attempt has ended.

    Args:
        history: the earlier attempts, oldest first.
    """
    why = cause(end)
    if end.state not in _RUNS:
        return _of_ended(end, why, history, policy)
    if end.want in ("stop", "cancel") or why in (DONE, ASKED, CANCELLED):
        return Decision(why, NONE)
    if why in _FINAL:
        return Decision(why, NONE, _FINAL[why])
    return _within(AGAIN, why, end, history, policy)


_FINAL = {
    DIVERGED: "the same numbers would come again",
    MISTAKE: "it would fail again in the same way",
    REFUSED: "the saved weights are of another model or format",
}


def _of_ended(end: End, why: str, history: Sequence[Past], policy: Policy) -> Decision:
    """Slurm ends the job: it has queued it again, or no person asked for the end, or that is it."""
    if end.requeued:
        return Decision(why, LEFT)
    if why in FOLLOWED and end.want not in ("stop", "cancel"):
        return _within(FOLLOW, why, end, history, policy)
    return Decision(why, NONE)


def _within(action: str, why: str, end: End, history: Sequence[Past], policy: Policy) -> Decision:
    """The action, unless the job's policy or its budget forbids it."""
    if not policy.enabled:
        return Decision(why, NONE, "requeue.enabled is false")
    if why in BUDGETS and (limit := int(getattr(policy, BUDGETS[why]))):
        used = _used(why, end, history)
        if used >= limit:
            return Decision(why, NONE, _spent(why, used))
    asked = why == TIMEOUT and policy.timeouts  # a program's own progress is not seen here
    if why in IDLE and not end.progress and not asked:
        idle = _row({why}, end, history)
        if idle >= IDLE[why]:
            more = "; requeue.timeouts allows more" if why == TIMEOUT else ""
            return Decision(why, NONE, f"{idle} attempts in a row ended so without progress{more}")
    return Decision(why, action)


def _spent(why: str, used: int) -> str:
    if why == TIMEOUT:
        return f"it has reached its time limit {used} times; requeue.timeouts allows no more"
    times = "once" if used == 1 else f"{used} times"
    return f"{times} without progress; requeue.{BUDGETS[why]} allows no more"


def _used(why: str, end: End, history: Sequence[Past]) -> int:
    """How much of a cause's budget is used up, this end included."""
    sharing = {c for c, key in BUDGETS.items() if key == BUDGETS[why]}
    if why == TIMEOUT:  # progress does not refill it
        return 1 + sum(past.cause in sharing for past in history)
    return _row(sharing, end, history)


def _row(causes: set[str], end: End, history: Sequence[Past]) -> int:
    """Attempts that ended for these causes without progress since the last progress."""
    if end.progress:
        return 0
    count = 1
    for past in reversed(history):
        if past.progress:
            break
        count += past.cause in causes
    return count


def ranks_code(end: End) -> int:
    """The exit code as the ranks mean it.

    A program's means what it says in the run dir, if that says something: its ranks saved and left.
    Told to leave, it does so with any code. Our own codes mean nothing where it came upon them by
    chance.
    """
    if not end.program:
        return end.code
    if end.left is not None:
        return end.left
    if end.want:
        return TERMINATED
    return exit_codes.FAILED if end.code in exit_codes.PRIVATE else end.code


def code_of(end: End) -> int:
    """The exit code that tells the cause: a stop is the same, whatever signal asked for it."""
    code = ranks_code(end)
    asked = end.preempted or end.requeued or bool(end.ending) or end.warned
    if code == 0 and end.program and asked:  # it was to leave, and may have more to do
        return TERMINATED
    return TERMINATED if code == end.own_signal else code


def cause(end: End) -> str:
    """Why an attempt ended; the first line that holds.

    An attempt that found itself fenced is not asked here: a newer one owns the run. Without a newer
    one, the file system has shown it what is not so, and that is a crash.
    """
    code = code_of(end)
    early = code in (TERMINATED, 128 + 12)  # by a signal that came before its handler
    quiet = end.kind in ("", "peer")  # a rank that lost another one tells no cause
    left = code == exit_codes.STOPPED or (early and quiet)
    runs = end.state in _RUNS
    local = end.state == LOCAL
    table = (
        (code == 0, DONE),
        (end.want == "cancel", CANCELLED),
        (not runs and bool(end.ending), end.ending),
        (end.killed, KILLED),
        (not runs and end.preempted and (end.requeued or not end.grace), PREEMPTED),
        (not runs and end.requeued, REQUEUED),
        (not runs, CANCELLED),
        (left and end.want == "stop", ASKED),
        (left and end.want == "preempt", PREEMPTED),
        (code in OF_CODE, OF_CODE.get(code, "")),
        (end.preempted and (left or quiet), PREEMPTED),
        (left and end.late, TIMEOUT),
        (local and left, CANCELLED if early else ASKED),  # only a person signals here
        (left, SIGNALLED),
        (end.kind in OF_KIND, OF_KIND.get(end.kind, "")),
    )
    return next((name for holds, name in table if holds), CRASH)
