"""Step 12, the facts about the end of an attempt, for ``decision.cause``.

They are in the run folder, in the log, and at Slurm. If an attempt's script was killed, only Slurm
may know why it ended.
"""

from __future__ import annotations

import math
import os
import signal
import time

from hpcddp.attempt import decision, first_failure, launch_facts, ledger, log_reader, requeue
from hpcddp.attempt.decision import End
from hpcddp.attempt.exit_codes import SIGKILLED, TERMINATED
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.record import JobRecord
from hpcddp.rundir import AttemptDir, RunDir, last_lines, read_json, read_lines, read_step
from hpcddp.slurm import commands as slurm
from hpcddp.slurm.hostlist import expand_hosts

LATE = 90.0  # seconds before the time limit: Slurm warns up to a minute early
GLANCE = 1.0  # seconds to wait for Slurm where the next attempt needs nothing of it
UNSEEN = 600.0  # seconds, at most, that a start without a record of a step counts
MOST, HOUR = 10, 3600.0  # restarts in one allocation, at most, in so many seconds


def gather(run: RunDir, mine: Attempt, job: JobRecord, code: int) -> End:
    """All known facts about the end of an attempt.

    Args:
        code: of the rank that failed first.
    """
    end = _of_run(run, mine, job, code)
    if not mine.slurm or (decision.ranks_code(end) == 0 and not end.program):
        return end
    return _of_slurm(run, mine, job, end)


def first_code(run: RunDir, mine: Attempt, code: int) -> int:
    """The exit code of the rank that failed first. srun returns the largest of all, also of ranks
    that it ended itself; its log names the first one."""
    if code not in (TERMINATED, SIGKILLED):
        return code
    return log_reader.first_code(log_reader.tail(run.attempt(mine.number).log), code)


def _of_run(run: RunDir, mine: Attempt, job: JobRecord, code: int) -> End:
    """The facts in the run folder."""
    folder = run.attempt(mine.number)
    log = log_reader.tail(folder.log)
    failure = read_json(folder.error) or {}
    program = bool(job.spec.get("command")) and not _finished(folder, code)
    left = read_json(folder.left) if program else None
    end = End(
        code,
        state=decision.LOCAL,
        want=(read_json(run.request) or {}).get("want", ""),
        program=program,
        left=int(left["code"]) if left else None,
        own_signal=_own_signal(),
    )
    code = decision.ranks_code(end)
    oom = bool(code) and any(words in log for words in log_reader.CGROUP_OOM)
    kind = "oom" if oom else first_failure.kind(run, mine, job, failure, code)
    return end._replace(kind=kind, progress=ledger.progress_of(run, mine))


def _of_slurm(run: RunDir, mine: Attempt, job: JobRecord, end: End) -> End:
    """The same, with Slurm's facts."""
    sizes, early = log_reader.sizes(mine), log_reader.ending_of(mine)
    here = _stays(run, mine, job, end)
    # A stop signal that meets no ranks is kept by their parents, or else only Slurm knows of it.
    parents = bool(launch_facts.of(job.launcher, job.launch).get("spares"))
    brief = here and mine.site and (parents or not mine.site.get("grace"))
    info = requeue.ask(mine, GLANCE) if brief else requeue.ask(mine)
    # If the job still runs, a message that it was cancelled is about a TERM for the batch script
    # alone. Meanwhile a message about the end itself may have come.
    if early == decision.CANCELLED and info and info.running:
        requeue.pass_over(run, mine, sizes)
    ending = log_reader.ending_of(mine)
    unknown = "COMPLETING" if ending else ""
    return end._replace(
        state=info.state if info else unknown,
        requeued=bool(info and info.restarts > mine.restarts),
        preempted=bool(info and info.preempted),
        ending=ending,
        grace=mine.site.get("grace", 0) > 0,
        late=_late(run, mine, job.lead),
        warned=bool(job.lead and mine.deadline and time.time() > mine.deadline - job.lead),
        here=here,
    )


def _stays(run: RunDir, mine: Attempt, job: JobRecord, end: End) -> bool:
    """Whether another attempt may start in this allocation: the job asks for it, its launcher can
    start ranks again, the ranks failed by themselves or enough other nodes are left, and there is
    time for a first step."""
    policy = job.spec.get("requeue", {})
    row = launch_facts.of(job.launcher, job.launch)
    cause = decision.cause(end._replace(state=""))
    if not (policy.get("here") and row.get("here") and decision.CAUSES[cause].here):
        return False
    left = _nodes_left(run, mine, job)
    same = left >= {*expand_hosts(mine.nodes)}
    enough = len(left) >= job.nodes[0] if row.get("spares") else same  # else none can be left out
    until = (mine.deadline or math.inf) - LATE - job.lead
    in_time = time.time() + _start(run, mine) < until
    return enough and in_time and not _in_vain(run, mine, end, same)


def _nodes_left(run: RunDir, mine: Attempt, job: JobRecord) -> set[str]:
    """The nodes of the allocation that the next attempt in it may use."""
    facts = read_json(run.attempt(mine.number).failed)
    hosts = facts["usable"] if facts else expand_hosts(mine.nodes)
    return {*hosts} - {*bad_nodes.barred(run, job, mine)}


def _in_vain(run: RunDir, mine: Attempt, end: End, same: bool) -> bool:
    """Whether restarts in place do not help: the attempt was one, and came to no step, so that its
    nodes may be why; or there were too many.

    Args:
        same: the next one would have its nodes again.
    """
    now = time.time()
    ended = {x.number: x.ended or 0.0 for x in ledger.attempts(run) if x.action == decision.HERE}
    often = sum(now - moment < HOUR for moment in ended.values()) >= MOST
    step = read_step(run.attempt(mine.number))[0]
    came = step > (mine.checkpoint or 0)
    if end.program and not step:  # it reports none
        came = now - mine.began > UNSEEN
    return often or (same and mine.number - 1 in ended and not (came or end.progress))


def _start(run: RunDir, mine: Attempt) -> float:
    """Seconds from the start of an attempt to its first step, if that is known."""
    for line in read_lines(run.attempt(mine.number).metrics):
        if line.get("event") in ("train", "step") and "time" in line:
            return float(line["time"]) - mine.began
    return min(UNSEEN, time.time() - mine.began)


def _own_signal() -> int:
    """The exit code of a rank that the job's own stop signal ended before it had a handler."""
    own = os.environ.get("HPCDDP_SIGNAL", "")
    return 128 + signal.Signals[f"SIG{own}"] if own else TERMINATED


def _finished(attempt: AttemptDir, code: int) -> bool:
    """Whether a program reports that it has finished: an attached loop does. Others may save and
    exit with 0 after a stop request."""
    if code or attempt.left.exists():
        return False
    ends = [x for x in last_lines(attempt.metrics, log_reader.TAIL) if x.get("event") == "end"]
    return bool(ends) and ends[-1].get("outcome") == "done"


def _late(run: RunDir, mine: Attempt, lead: int) -> bool:
    """Whether the time limit was near: by the clock, or by rank 0, which knows its saves."""
    if not mine.deadline:
        return False
    if time.time() > mine.deadline - LATE - lead:
        return True
    lines = last_lines(run.attempt(mine.number).metrics, log_reader.TAIL)
    return any(line.get("event") == "end" and line.get("by") == "time limit" for line in lines)


def was_killed(run: RunDir, mine: Attempt, info: slurm.JobInfo) -> bool:
    """Whether a SIGKILL that was not Slurm's ended a batch script: Slurm reports the signal, but
    has no message about the end, and there is no request."""
    ended = info.state in ("COMPLETING", "FAILED") and info.exit_code.endswith(":9")
    return ended and not log_reader.ending_of(mine) and not read_json(run.request)


def why_ended(run: RunDir, mine: Attempt, timeout: float = slurm.TIMEOUT) -> str:
    """Why an attempt ended that could not record it: a cause, or "".

    Raises:
        SlurmUnreachable: no message shows it, and Slurm does not answer.
    """
    if cause := log_reader.ending_of(mine):
        return cause
    if not mine.slurm:
        return ""
    info = slurm.facts(mine.job_id, timeout)
    if info and was_killed(run, mine, info):
        return decision.KILLED
    # The message may be on another node, if it could not be copied.
    return decision.OF_STATE.get(info.state, "") if info else ""
