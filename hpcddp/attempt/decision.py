"""Step 12: what follows the end of an attempt.

``decide`` is a pure function: from the ranks' exit code, Slurm's facts, the history and the job's
policy to a cause and an action. It never continues a run that a user ended: a job that Slurm ends
is followed only if Slurm's message rules out a user.
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
ENVIRONMENT = "environment"  # a step of it failed before the ranks could start
BAD_NODE = "bad node"  # one failed its checks twice
LOST = "lost node"  # one gives no sign of life, and Slurm has not ended the job for it
KILLED = "script killed"  # the batch script, by a SIGKILL not from Slurm
UNKNOWN = "unknown"


class Cause(NamedTuple):
    """A row of the table: how a cause is recognized, and what follows.

    Args:
        kinds: of the failure that a rank recorded, see error_record.py.
        code: the ranks' exit code that alone shows it.
        words: in Slurm's message when it ends the job.
        job_state: the job's final state at Slurm.
        budget: the key of [requeue] that limits the requeues; "" for no limit.
        idle: attempts in a row without progress that end a run, whatever its budget; 0 for any.
        followed: if Slurm ends the job for it, a follow-up job continues.
        final: why a requeue does not help; "" if it may.
        early: the same, as long as no attempt ended for another cause.
        calm: no rank caused it: messages of the ending ranks are irrelevant.
        here: the next attempt may start in the same allocation, on the same nodes.
        state: of a run that is not requeued; "" if only its job knows.
    """

    kinds: tuple[str, ...] = ()
    code: int | None = None
    words: str = ""
    job_state: str = ""
    budget: str = ""
    idle: int = 0
    followed: bool = False
    final: str = ""
    early: str = ""
    calm: bool = False
    here: bool = False
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
    CRASH: Cause(budget="crashes", here=True),
    OOM: Cause(kinds=("oom",), budget="crashes", here=True, state="OUT_OF_MEMORY"),
    HANG: Cause(kinds=("hang",), code=exit_codes.HUNG, budget="hangs", here=True),
    DIVERGED: Cause(
        kinds=("diverged",), code=exit_codes.DIVERGED, final="a requeue would diverge again"
    ),
    MISTAKE: Cause(kinds=("mistake", "damaged"), final="it would fail again in the same way"),
    ENVIRONMENT: Cause(
        kinds=("environment",), budget="crashes", early="it would fail again in the same way"
    ),
    BAD_NODE: Cause(kinds=("node",), idle=4, here=True),
    LOST: Cause(kinds=("lost",), idle=10, here=True),
    REFUSED: Cause(kinds=("foreign",), final="the checkpoint is of another model or format"),
    KILLED: Cause(budget="crashes", followed=True),
    SUPERSEDED: Cause(calm=True),
    UNKNOWN: Cause(),
}  # fmt: skip
FOLLOWED = tuple(name for name, row in CAUSES.items() if row.followed)
OF_CODE = {row.code: name for name, row in CAUSES.items() if row.code is not None}
OF_KIND = {kind: name for name, row in CAUSES.items() for kind in row.kinds}
# A user's cancel is none of these.
OF_STATE = {row.job_state: name for name, row in CAUSES.items() if row.job_state}

# Actions.
NONE = "none"  # the run ends
AGAIN = "requeue"  # its batch script requeues the job
FOLLOW = "follow-up"  # Slurm ends this job: a new one continues
LEFT = "left to Slurm"  # Slurm has requeued the job
HERE = "here"  # its batch script starts the next attempt in the same allocation

WAITS = (AGAIN, FOLLOW, LEFT)  # actions after which Slurm starts the next attempt
RETURNS = (*WAITS, HERE)  # actions after which the run continues
STARTS = (AGAIN, FOLLOW, HERE)  # those that the batch script takes itself

LOCAL = "LOCAL"  # the state of a job without a scheduler
_RUNS = ("RUNNING", "SIGNALING", LOCAL, "")  # "": the controller did not answer


class Policy(NamedTuple):
    """The job's [requeue] table."""

    enabled: bool = True
    crashes: int = 3
    hangs: int = 3
    timeouts: int = 0  # 0: no limit

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Policy:
        """The policy in a job's table; its other keys are ignored."""
        return cls(**{name: table[name] for name in cls._fields if name in table})


class End(NamedTuple):
    """The facts after the ranks have ended."""

    code: int  # of the rank that failed first, or the launcher's
    state: str = "RUNNING"  # the job's, at Slurm
    requeued: bool = False  # Slurm has requeued it
    preempted: bool = False  # Slurm records a preemption of this attempt
    ending: str = ""  # why Slurm ends the job, by its message: a cause
    grace: bool = False  # preemption at this site gives time before it ends the job
    want: str = ""  # a user's request: stop, cancel, preempt
    kind: str = ""  # of the failure that a rank recorded; "peer" is of no cause
    late: bool = False  # the time limit was near
    progress: bool = False  # a complete checkpoint is newer than at the attempt's start
    killed: bool = False  # a SIGKILL that was not Slurm's ended the batch script
    program: bool = False  # the job is a program that has not reported its end
    left: int | None = None  # the exit code that a program's ranks recorded after they saved
    own_signal: int = TERMINATED  # exit code of a rank that the job's own stop signal ends
    warned: bool = False  # Slurm has sent the signal before the time limit
    here: bool = False  # the allocation may and can take another attempt: see end_facts.py

    @property
    def leaves(self) -> bool:
        """Whether Slurm or a user takes the nodes away, or is about to."""
        announced = self.preempted or self.late or self.warned or self.requeued
        return announced or bool(self.ending or self.want) or self.state not in _RUNS


class Past(NamedTuple):
    """The facts of an earlier attempt."""

    cause: str
    progress: bool


class Decision(NamedTuple):
    """Why an attempt ended, the action, and its reason."""

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
    if (early := CAUSES[why].early) and all(past.cause == why for past in history):
        return Decision(why, NONE, early)
    here = end.here and CAUSES[why].here and not end.leaves
    return _within(HERE if here else AGAIN, why, end, history, policy)


def _of_ended(end: End, why: str, history: Sequence[Past], policy: Policy) -> Decision:
    """The decision for a job that Slurm ends: it has requeued the job, or we may follow, or not."""
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
    asked = why == TIMEOUT and policy.timeouts  # a program's progress may be unknown
    if row.idle and not end.progress and not asked:
        idle = _in_a_row({why}, end, history)
        if idle >= row.idle:
            more = "; raise requeue.timeouts to allow more" if why == TIMEOUT else ""
            return Decision(why, NONE, f"{idle} such attempts in a row without progress{more}")
    return Decision(why, action)


def _spent(why: str, used: int) -> str:
    times = "once" if used == 1 else f"{used} times"
    if why == TIMEOUT:
        return f"time limit reached {times}; requeue.timeouts allows no more"
    return f"{times} without progress; requeue.{CAUSES[why].budget} allows no more"


def _used(why: str, end: End, history: Sequence[Past]) -> int:
    """How much of a cause's budget is used up, this end included."""
    sharing = {name for name, row in CAUSES.items() if row.budget == CAUSES[why].budget}
    if why == TIMEOUT:  # progress does not refill it
        return 1 + sum(past.cause in sharing for past in history)
    return _in_a_row(sharing, end, history)


def _in_a_row(causes: set[str], end: End, history: Sequence[Past]) -> int:
    """Attempts since the last progress that ended for these causes."""
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

    If a program's ranks recorded that they saved, that counts. After a stop request, a program may
    leave with any code. Our private codes mean nothing in a program.
    """
    if not end.program:
        return end.code
    if end.left is not None:
        return end.left
    if end.want:
        return TERMINATED
    return exit_codes.FAILED if end.code in exit_codes.PRIVATE else end.code


def code_of(end: End) -> int:
    """The exit code that shows the cause: all stop signals count the same."""
    code = ranks_code(end)
    asked = end.preempted or end.requeued or bool(end.ending) or end.warned
    if code == 0 and end.program and asked:  # stopped, and may have more to do
        return TERMINATED
    return TERMINATED if code == end.own_signal else code


def cause(end: End) -> str:
    """Why an attempt ended; the first line that holds.

    A superseded attempt does not get here. An attempt that took itself for superseded, without a
    newer one, has crashed: the file system showed it wrong data.
    """
    code = code_of(end)
    early = code in (TERMINATED, exit_codes.USR2)  # by a signal before its handler was installed
    quiet = end.kind in ("", "peer")  # a rank that lost another one shows no cause
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
        (OF_KIND.get(end.kind) == BAD_NODE, BAD_NODE),  # the ranks were told to stop, and may save
        (code in OF_CODE, OF_CODE.get(code, "")),
        (end.preempted and (left or quiet), PREEMPTED),
        (left and end.late, TIMEOUT),
        (local and left, CANCELLED if early else ASKED),  # only a user signals here
        (left, SIGNALLED),
        (end.kind in OF_KIND, OF_KIND.get(end.kind, "")),
    )
    return next((name for holds, name in table if holds), CRASH)
