"""The commands of the batch script on its host, before and after the ranks.

    begin RUN PID [N [look]]  checks and claims the run folder, to follow attempt N; prints a line
                         for the script: attempt, MASTER_ADDR, MASTER_PORT, end of the time limit,
                         run folder. On Slurm it leaves the attempt's sentry (sentry.py) running.
    end RUN N CODE [LACK]  decides what follows attempt N, and does it; prints the exit code of the
                         job, or `again` if the script is to start again itself. LACK is the
                         step of the environment that failed before the ranks could start
    watch RUN N PID      warns if the ranks that PID started never reach the rendezvous
    ranks RUN N PID NODES SRUN...  runs the ranks of attempt N of the script PID, whose nodes'
                         parents SRUN starts; exits with their exit code
    preflight RUN N PID  checks the nodes, and ends the ranks that PID started if one fails twice
    check-node RUN N FIRST BOOT [GPUS]  on each node: prints its faults as JSON; see
                         nodes/node_check.py
    bereaved RUN N [NODE]  on another node, with its number: requeues the run, or ends its wait, if
                         the batch script cannot
    stacks RUN N         prints the stacks of the attempt's ranks on this node, as JSON lines
    shell RUN N RANK ... becomes a shell in the environment of a rank on this node; the further
                         words enter its container

It runs from RUN/host.pyz with any Python, outside of a container and without the job's environment.
Exit codes: FAILED, the answer is no; AWAY, there is no answer yet: the run folder cannot be read or
written, or Slurm does not answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from hpcddp import record
from hpcddp.attempt import (
    decision,
    end_facts,
    error_record,
    ledger,
    log_reader,
    lost_script,
    refused_resume,
    rendezvous,
    requeue,
    sentry,
)
from hpcddp.attempt.claim import begin, clear, say
from hpcddp.attempt.decision import Decision, Policy
from hpcddp.attempt.end_facts import gather
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.link import channel
from hpcddp.attempt.nodes import node_events
from hpcddp.errors import HpcddpError, RunUnreadable, SlurmUnreachable
from hpcddp.rundir import RunDir

LOOKS = 3  # decisions about a job that changes meanwhile
FAILED, AWAY = 3, 4  # exit codes of this program, see above
INSTEAD = "instead="  # before the id of a job that this one replaces
BLOCKED = 120  # seconds that a file system may block `begin`


def end(run: RunDir, number: int, code: int) -> str:
    """Decide what follows, record it, and do it; returns what the script does then."""
    mine = ledger.owner(run, number)
    if mine is None:
        print(f"hpcddp: attempt {number} was superseded by a newer one")
        return "1"
    job, mine = record.read(run), ledger.refreshed(run, mine)
    code = end_facts.first_code(run, mine, code)
    policy = Policy.of(job.spec.get("requeue", {}))
    took = time.time() - mine.began
    for _ in range(LOOKS):
        verdict = decision.decide(gather(run, mine, job, code), requeue.past(run), policy)
        if _followed(run, mine, verdict):
            return "0"
        if verdict.cause == decision.REFUSED:
            refused_resume.put_back(run, number)
        next_ = verdict.action + (f" ({verdict.reason})" if verdict.reason else "")
        # Before the record: who follows the log leaves once the run has ended.
        print(f"hpcddp: attempt {number} ended after {took:.0f} s: {verdict.cause}, "
              f"exit code {code}; next: {next_}", flush=True)  # fmt: skip
        written = _ended(run, mine, code, verdict)
        node_events.record_end(run, mine, verdict.cause)
        if mine.slurm and verdict.action != decision.HERE:
            channel.dismiss(mine.pid)
        if written is None or verdict.action not in decision.STARTS:
            _drop(run, mine, verdict, job.name)
            if verdict.action == decision.NONE:
                clear(mine)
            break
        if answer := requeue.bring_back(run, written, verdict, job):
            if written.successor:
                clear(mine)
            return answer
    else:  # not requeued: the ledger must not say so
        none = Decision(verdict.cause, decision.NONE, "Slurm is ending the job")
        _ended(run, mine, code, none)
    well = verdict.cause in (decision.DONE, decision.ASKED) or verdict.action == decision.LEFT
    return "0" if well else "1"


def _followed(run: RunDir, mine: Attempt, verdict: Decision) -> bool:
    """Whether another node has recorded an attempt's end, and a job that follows it: this script or
    its node did not answer for some time. If the ranks are done, that job finds so, and leaves."""
    with contextlib.suppress(RunUnreadable):
        known = ledger.owner(run, mine.number)
        if known and known.action == decision.FOLLOW and known.successor:
            if verdict.cause == decision.DONE:
                return False
            print(f"hpcddp: job {known.successor} continues: another node took this one for lost")
            channel.dismiss(mine.pid)
            return True
    return False


def _ended(run: RunDir, mine: Attempt, code: int, verdict: Decision) -> Attempt | None:
    """Record an attempt's end; None if it is superseded. On a full disk the action is done
    all the same."""
    try:
        written = ledger.end(run, mine.number, code, verdict.cause, verdict.action, verdict.reason)
    except (OSError, RunUnreadable) as error:
        print(f"hpcddp: not recorded: {error}", flush=True)
        mine.exit_code, mine.cause, mine.action = code, verdict.cause, verdict.action
        return mine
    return written and ledger.refreshed(run, written)


def _drop(run: RunDir, mine: Attempt, verdict: Decision, name: str) -> None:
    """Cancel the follow-up that the sentry submitted, if nothing is to follow. If it is not found,
    it leaves by itself when it starts."""
    if mine.slurm and verdict.action == decision.NONE and log_reader.ending_of(mine):
        with contextlib.suppress(SlurmUnreachable):
            requeue.drop(run, name, upto=mine.number, but=mine.job_id)


def _deaf() -> None:
    """Ignore TERM: at the end of a job, Slurm sends it for the ranks."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def main(args: list[str], *, stay: bool = False) -> int:
    """Run a verb; the exit code of this program.

    Args:
        stay: leave the sentry of a new attempt running.
    """
    verb, folder, *words = args
    run = RunDir(folder)
    try:
        claim = VERBS[verb](run, words)
        if stay and claim:
            _post_sentry(claim)
    except (HpcddpError, OSError) as error:
        later = away(run, error)
        if verb == "begin" and not later and run.path.exists():
            say(run, str(error))
        else:
            print(f"hpcddp: {error}", file=sys.stderr)
        return AWAY if later else FAILED
    return 0


def _begin(run: RunDir, words: list[str]) -> str:
    """Claim the run folder, and print the line for the script."""
    if "SLURM_JOB_ID" in os.environ:
        _deaf()  # Slurm may already end the job; the sentry sees why
    signal.alarm(BLOCKED)
    instead = [word.removeprefix(INSTEAD) for word in words if word.startswith(INSTEAD)]
    follows, look = int("".join(words[1:2]) or 0), requeue.LOOK in words
    claim = begin(run, int(words[0]), follows, look, instead)
    print(claim, flush=True)
    signal.alarm(0)
    return claim


def _post_sentry(claim: str) -> None:
    """Leave the sentry of an attempt running; without it the claim counts all the same."""
    number, *_, path = claim.split(" ", 4)
    with contextlib.suppress(HpcddpError, OSError):
        sentry.post(RunDir(path), int(number))


def _end(run: RunDir, words: list[str]) -> str:
    """Decide what follows; only the answer is printed for the script, all else goes to the log."""
    _deaf()  # a requeued job gets TERM at once
    with contextlib.redirect_stdout(sys.stderr):
        if lack := "".join(words[2:]):
            print(f"hpcddp: {lack}", flush=True)
            error_record.report_for_all(run.attempt(int(words[0])), "environment", lack)
        answer = end(run, int(words[0]), int(words[1]))
    print(answer)
    return ""


def _ranks(run: RunDir, words: list[str]) -> str:
    from hpcddp.attempt.link import supervised

    sys.exit(supervised.run(run, int(words[0]), int(words[1]), int(words[2]), words[3:]))


def _watch(run: RunDir, words: list[str]) -> str:
    rendezvous.watch(run, int(words[0]), int(words[1]), os.environ)
    return ""


def _preflight(run: RunDir, words: list[str]) -> str:
    from hpcddp.attempt.nodes import preflight

    preflight.check(run, int(words[0]), int(words[1]), os.environ.get("MASTER_ADDR", ""))
    return ""


def _check_node(run: RunDir, words: list[str]) -> str:
    from hpcddp.attempt.nodes import node_check

    wanted = int(words[3]) if len(words) > 3 else None
    print(node_check.answer(run, int(words[0]), words[1], words[2], wanted), flush=True)
    return ""


def _bereaved(run: RunDir, words: list[str]) -> str:
    _deaf()
    lost_script.bring_back(run, *map(int, words))
    return ""


def _stacks(run: RunDir, words: list[str]) -> str:
    from hpcddp.stacks import stack_reader  # an attempt begins and ends without it

    for line in stack_reader.lines(str(run.path), int(words[0])):
        print(line, flush=True)
    return ""


def _shell(run: RunDir, words: list[str]) -> str:
    from hpcddp.stacks import rank_shell

    rank_shell.become(str(run.path), int(words[0]), int(words[1]), words[2:])


# Verb -> function of the run and the other words; returns the claim, if any.
VERBS: dict[str, Callable[[RunDir, list[str]], str]] = {
    "begin": _begin, "end": _end, "watch": _watch, "bereaved": _bereaved, "stacks": _stacks,
    "shell": _shell, "ranks": _ranks, "preflight": _preflight, "check-node": _check_node,
}  # fmt: skip


def away(run: RunDir, error: Exception) -> bool:
    """Whether an error may pass: a missing run folder may be a file system that does not answer."""
    if isinstance(error, (OSError, RunUnreadable, SlurmUnreachable)):
        return True
    try:
        return not (run.deleted() or run.job.exists())
    except OSError:
        return True


def run() -> None:
    """Run host.pyz."""
    sys.exit(main(sys.argv[1:], stay=True))


if __name__ == "__main__":
    run()
