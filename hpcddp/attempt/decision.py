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

# Why an attempt ended.
DONE, ASKED, CANCELLED, PREEMPTED = "done", "stopped", "cancelled", "preempted"
TIMEOUT, SIGNALLED, NODE, REQUEUED = "time limit", "signalled", "node failure", "requeued"
CRASH, OOM, HANG, DIVERGED = "crash", "out of memory", "hang", "diverged"
MISTAKE, SUPERSEDED, REFUSED = "mistake", "superseded", "refused"
KILLED = "script killed"  # the batch script, by a SIGKILL that was not Slurm's
UNKNOWN = "unknown"


class Cause(NamedTuple):
    """A row of the table: how a cause shows, and what follows from it.

    Args:
        kinds: of the failure that a rank wrote down, see error_record.py.
        code: the ranks' exit code that tells it alone.
        words: Slurm's own in the job's log, when it ends the job for it.
        job_state: the state that Slurm then gives the job for good.
        budget: the key of [requeue] that limits the restarts; "" for no limit.
        idle: attempts in a row without progress that end a run, whatever its budget; 0 for any.
        followed: a new job goes on where Slurm ends the job for it.
        final: why no restart helps; "" if one may.
        calm: it is no rank's doing: what the ranks say as they leave tells nothing.
        state: the run's, where it does not come back; "" for one that only its job tells.
    """

    kinds: tuple[str, ...] = ()
    code: int | None = None
    words: str = ""
    job_state: str = ""
    budget: str = ""
    idle: int = 0
    followed: bool = False
    final: str = ""
    calm: bool = False
    state: str = ""


CAUSES = {
    DONE: Cause(calm=True, state="COMPLETED"),
    ASKED: Cause(calm=True, state="STOPPED"),
    CANCELLED: Cause(calm=True, state="CANCELLED"),
    PREEMPTED: Cause(
        words="PREEMPTION", job_state="PREEMPTED", followed=True, calm=True, state="PREEMPTED",
    ),
    TIMEOUT: Cause(
        words="TIME LIMIT", job_state="TIMEOUT", budget="timeouts", idle=3, followed=True,
        calm=True, state="TIMEOUT",
    ),
    SIGNALLED: Cause(calm=True, idle=3, state="STOPPED"),
    NODE: Cause(words="NODE FAILURE", job_state="NODE_FAIL", followed=True, state="NODE_FAIL"),
    REQUEUED: Cause(words="JOB REQUEUE", calm=True),
    CRASH: Cause(budget="crashes"),
    OOM: Cause(kinds=("oom",), budget="crashes", state="OUT_OF_MEMORY"),
    HANG: Cause(kinds=("hang",), code=exit_codes.HUNG, budget="hangs"),
    DIVERGED: Cause(
        kinds=("diverged",), code=exit_codes.DIVERGED, final="the same numbers would come again"
    ),
    MISTAKE: Cause(kinds=("mistake", "damaged"), final="it would fail again in the same way"),
    REFUSED: Cause(kinds=("foreign",), final="the saved weights are of another model or format"),
    KILLED: Cause(budget="crashes", followed=True),
    SUPERSEDED: Cause(calm=True),
    UNKNOWN: Cause(),
}  # fmt: skip
FOLLOWED = tuple(name for name, row in CAUSES.items() if row.followed)
OF_CODE = {row.code: name for name, row in CAUSES.items() if row.code is not None}
OF_KIND = {kind: name for name, row in CAUSES.items() for kind in row.kinds}
# A person's cancel is none of these.
OF_STATE = {row.job_state: name for name, row in CAUSES.items() if row.job_state}

# Actions: what is done about it.
NONE = "none"  # it stays ended
AGAIN = "requeue"  # its batch script queues it again
FOLLOW = "follow-up"  # Slurm ends this job for good: a new one goes on
LEFT = "left to Slurm"  # Slurm has queued it again

RETURNS = (AGAIN, FOLLOW, LEFT)  # actions after which the run comes back

LOCAL = "LOCAL"  # the state of a job without a scheduler
_RUNS = ("RUNNING", "SIGNALING", LOCAL, "")  # "" is a controller that did not answer


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
    if final := CAUSES[why].final:
        return Decision(why, NONE, final)
    return _within(AGAIN, why, end, history, policy)


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
    row = CAUSES[why]
    if row.budget and (limit := int(getattr(policy, row.budget))):
        used = _used(why, end, history)
        if used >= limit:
            return Decision(why, NONE, _spent(why, used))
    asked = why == TIMEOUT and policy.timeouts  # a program's own progress is not seen here
    if row.idle and not end.progress and not asked:
        idle = _in_a_row({why}, end, history)
        if idle >= row.idle:
            more = "; requeue.timeouts allows more" if why == TIMEOUT else ""
            return Decision(why, NONE, f"{idle} attempts in a row ended so without progress{more}")
    return Decision(why, action)


def _spent(why: str, used: int) -> str:
    if why == TIMEOUT:
        return f"it has reached its time limit {used} times; requeue.timeouts allows no more"
    times = "once" if used == 1 else f"{used} times"
    return f"{times} without progress; requeue.{CAUSES[why].budget} allows no more"


def _used(why: str, end: End, history: Sequence[Past]) -> int:
    """How much of a cause's budget is used up, this end included."""
    sharing = {name for name, row in CAUSES.items() if row.budget == CAUSES[why].budget}
    if why == TIMEOUT:  # progress does not refill it
        return 1 + sum(past.cause in sharing for past in history)
    return _in_a_row(sharing, end, history)


def _in_a_row(causes: set[str], end: End, history: Sequence[Past]) -> int:
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
    early = code in (TERMINATED, exit_codes.USR2)  # by a signal that came before its handler
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
