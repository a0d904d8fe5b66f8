"""What the batch script asks on its host, before and after the ranks: standard library only.

    begin RUN PID [N [look]]  checks and claims the run dir, to follow attempt N; prints one line
                         for the script: attempt, MASTER_ADDR, MASTER_PORT, end of the time limit,
                         run dir. On Slurm the sentry of the attempt (sentry.py) stays behind.
    end RUN N CODE       decides what follows the end of attempt N, and does it; prints the exit
                         code of the job, or `again` where the script itself starts over
    watch RUN N PID      tells when the ranks that PID started never meet
    bereaved RUN N       on a node whose ranks are gone: brings the run back, or ends its wait,
                         where the batch script cannot

It runs from RUN/host.pyz with whatever Python there is, beside a container too, and when the
environment of the job is gone. It leaves with FAILED where the answer is no, and with AWAY where
there is none yet: the run dir cannot be read or written, or Slurm does not answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from hpcddp import record
from hpcddp.attempt import (
    decision,
    exit_codes,
    first_failure,
    ledger,
    log_reader,
    refused_resume,
    rendezvous,
    requeue,
    sentry,
)
from hpcddp.attempt.claim import begin, clear, say
from hpcddp.attempt.decision import Decision, End, Policy
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import HpcddpError, RunUnreadable, SlurmUnreachable
from hpcddp.rundir import RunDir, last_lines, read_json

LATE = 90.0  # seconds before the time limit: Slurm warns up to a minute early
LOOKS = 3  # at a job that changes while it is decided about
FAILED, AWAY = 3, 4  # exit codes of this program, see above
INSTEAD = "instead="  # before the id of a job in whose place this one begins
BLOCKED = 120  # seconds after which a begin that a file system blocks is ended
TERMINATED, KILLED = 128 + 15, 128 + 9  # exit codes of what a signal ended


def end(run: RunDir, number: int, code: int) -> str:
    """Decide what follows, write it down, and do it; what the script does then."""
    mine = ledger.owner(run, number)
    if mine is None:
        print(f"hpcddp: a newer attempt works on this run: attempt {number} is over")
        return "1"
    job, mine = record.read(run), sentry.known(run, mine)
    code = _first_code(run, mine, code)
    policy = Policy.of(job.spec.get("requeue", {}))
    took = time.time() - mine.began
    for _ in range(LOOKS):
        found = decision.decide(gather(run, mine, code), requeue.past(run), policy)
        if found.cause == decision.REFUSED:
            refused_resume.put_back(run, number)
        written = _ended(run, mine, code, found)
        next_ = found.action + (f" ({found.reason})" if found.reason else "")
        print(f"hpcddp: attempt {number} ended after {took:.0f} s: {found.cause}, "
              f"exit code {code}; next: {next_}", flush=True)  # fmt: skip
        if written is None or found.action not in (decision.AGAIN, decision.FOLLOW):
            _drop(run, mine, found, job.name)
            if found.action == decision.NONE:
                clear(mine)
            break
        if answer := requeue.bring_back(run, written, found, job):
            if written.successor:
                clear(mine)
            return answer
    else:  # nobody brings it back: the ledger must not say so
        none = Decision(found.cause, decision.NONE, "Slurm begins to end the job")
        _ended(run, mine, code, none)
    well = found.cause in (decision.DONE, decision.ASKED) or found.action == decision.LEFT
    return "0" if well else "1"


def _ended(run: RunDir, mine: Attempt, code: int, found: Decision) -> Attempt | None:
    """Write an attempt's end; None if a newer one has begun. What cannot be written, on a full
    disk, is done all the same."""
    try:
        written = ledger.end(run, mine.number, code, found.cause, found.action, found.reason)
    except (OSError, RunUnreadable) as error:
        print(f"hpcddp: not written down: {error}", flush=True)
        mine.exit_code, mine.cause, mine.action = code, found.cause, found.action
        return mine
    return written and sentry.known(run, written)


def _drop(run: RunDir, mine: Attempt, found: Decision, name: str) -> None:
    """Cancel the job that the sentry submitted at Slurm's words, where nothing is to follow. One
    that is not found leaves by itself when it begins."""
    if mine.slurm and found.action == decision.NONE and log_reader.ending_of(mine):
        with contextlib.suppress(SlurmUnreachable):
            requeue.drop(run, name, upto=mine.number, but=mine.job_id)


def gather(run: RunDir, mine: Attempt, code: int) -> End:
    """All that can be known about the end of an attempt."""
    log = log_reader.tail(run.attempt(mine.number).log)
    failure = read_json(run.attempt(mine.number).error) or {}
    oom = any(words in log for words in log_reader.NO_MEMORY)
    want = (read_json(run.request) or {}).get("want", "")
    program = bool(record.read(run).spec.get("command")) and not _finished(run, mine, code)
    if program:
        code = _code_of_program(run, mine, code, want)
    common = End(
        TERMINATED if code == _own_signal() else code,
        state=decision.LOCAL,
        want=want,
        kind="oom" if oom and code else first_failure.kind(run, mine, failure, code),
        progress=ledger.progress_of(run, mine),
    )
    if not mine.slurm or (code == 0 and not program):
        return common
    sizes, early = log_reader.sizes(mine), log_reader.ending_of(mine)
    known = requeue.ask(mine)
    # Where the job runs after them, words that it is cancelled are of a TERM for the batch script
    # alone. While Slurm answers it may say what does end the job.
    if early == decision.CANCELLED and known and known.running:
        requeue.pass_over(run, mine, sizes)
    facts = {**common._asdict(), "ending": log_reader.ending_of(mine), "state": ""}
    if known:
        facts |= {
            "state": known.state,
            "requeued": known.restarts > mine.restarts,
            "preempted": known.preempted,
        }
    elif facts["ending"]:
        facts["state"] = "COMPLETING"
    facts["grace"] = mine.site.get("grace", 0) > 0
    facts["late"] = _late(run, mine)
    told = facts["preempted"] or facts["requeued"] or facts["ending"] or _warned(run, mine)
    if code == 0 and told:  # it was to leave, and may have more to do
        facts["code"] = TERMINATED
    return End(**facts)


def _own_signal() -> int:
    """The exit code of a rank that the job's own stop signal has ended, before it had a handler."""
    own = os.environ.get("HPCDDP_SIGNAL", "")
    return 128 + signal.Signals[f"SIG{own}"] if own else TERMINATED


def _finished(run: RunDir, mine: Attempt, code: int) -> bool:
    """Whether a program says that it has come to its end: a loop that is attached does. Of others
    nobody knows: told to leave, some save and leave with 0."""
    attempt = run.attempt(mine.number)
    if code or attempt.left.exists():
        return False
    ends = [x for x in last_lines(attempt.metrics, log_reader.TAIL) if x.get("event") == "end"]
    return bool(ends) and ends[-1].get("outcome") == "done"


def _first_code(run: RunDir, mine: Attempt, code: int) -> int:
    """The exit code of the rank that failed first. srun's own is the largest of all, of those too
    that it ended because one had failed; that one it names first."""
    if code not in (TERMINATED, KILLED):
        return code
    return log_reader.first_code(log_reader.tail(run.attempt(mine.number).log), code)


def _code_of_program(run: RunDir, mine: Attempt, code: int, want: str) -> int:
    """A program's exit code means what it says in the run dir, if that says something: its ranks
    saved and left. Told to leave, it does so with any code. Our own codes mean nothing where it
    came upon them by chance."""
    left = read_json(run.attempt(mine.number).left)
    if left:
        return int(left["code"])
    if want:
        return TERMINATED
    return exit_codes.FAILED if code in exit_codes.PRIVATE else code


def _late(run: RunDir, mine: Attempt) -> bool:
    """Whether the time limit was near: by the clock, or as rank 0 says, which knows its saves."""
    if not mine.deadline:
        return False
    if time.time() > mine.deadline - LATE - record.read(run).lead:
        return True
    lines = last_lines(run.attempt(mine.number).metrics, log_reader.TAIL)
    return any(line.get("event") == "end" and line.get("by") == "time limit" for line in lines)


def _warned(run: RunDir, mine: Attempt) -> bool:
    """Whether Slurm has sent the signal that the job asks for before its time limit."""
    lead = record.read(run).lead
    return bool(lead and mine.deadline and time.time() > mine.deadline - lead)


def _deaf() -> None:
    """Slurm's TERM at the end of a job is for the ranks."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(args: list[str], *, stay: bool = False) -> int:
    """Dispatch `begin`, `end`, `watch` and `bereaved`.

    Args:
        stay: the sentry of an attempt that begins stays behind.
    """
    verb, folder, *rest = args
    run = RunDir(folder)
    try:
        if verb == "begin":
            if "SLURM_JOB_ID" in os.environ:
                _deaf()  # the job may be ended already; the sentry sees why
            signal.alarm(BLOCKED)
            instead = [x.removeprefix(INSTEAD) for x in rest if x.startswith(INSTEAD)]
            follows, look = int("".join(rest[1:2]) or 0), requeue.LOOK in rest
            claim = begin(run, int(rest[0]), follows, look, instead)
            print(claim, flush=True)
            signal.alarm(0)
            if stay and claim:
                number, *_, path = claim.split(" ", 4)
                with contextlib.suppress(HpcddpError, OSError):  # the claim is made
                    sentry.post(RunDir(path), int(number))
        elif verb == "end":
            _deaf()  # a job that is queued again gets TERM at once
            # What is said on the way goes to the log; the answer alone to the script.
            with contextlib.redirect_stdout(sys.stderr):
                answer = end(run, int(rest[0]), int(rest[1]))
            print(answer)
        elif verb == "watch":
            rendezvous.watch(run, int(rest[0]), int(rest[1]), os.environ)
        else:
            _deaf()
            sentry.bereaved(run, int(rest[0]))
    except (HpcddpError, OSError) as error:
        later = away(run, error)
        if verb == "begin" and not later and run.path.exists():
            say(run, str(error))
        else:
            print(f"hpcddp: {error}", file=sys.stderr)
        return AWAY if later else FAILED
    return 0


def away(run: RunDir, error: Exception) -> bool:
    """Whether an error may pass: a run dir that is not there may be a file system that is away."""
    if isinstance(error, (OSError, RunUnreadable, SlurmUnreachable)):
        return True
    try:
        return not (run.deleted() or run.job.exists())
    except OSError:
        return True


def run() -> None:
    """What host.pyz does."""
    sys.exit(main(sys.argv[1:], stay=True))


if __name__ == "__main__":
    run()
