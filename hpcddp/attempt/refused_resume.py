"""A request that is refused changes nothing: which attempt's end is the run's, and what was asked.

A `resume` whose model does not fit the run's checkpoints is refused before anything is changed,
where that can be seen. Else its first attempt finds it out. The run then has the state that it had,
and the job.json and the script too, so that the next `resume` goes by what was asked before: resume
leaves a copy of both in the folder of the attempt that came last. (standard library only)
"""

from __future__ import annotations

import contextlib

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, write_bytes


def of(run: RunDir, last: Attempt) -> Attempt:
    """The attempt whose end is the run's: the newest, unless its request was refused."""
    return (before(run, last.number) or last) if last.cause == decision.REFUSED else last


def before(run: RunDir, number: int) -> Attempt | None:
    """The attempt that ended the run before the request of this one; None if the run was not ended,
    but came back by itself, and the user's code is another one since."""
    for facts in reversed(ledger.attempts(run)):
        if facts.number >= number or facts.cause == decision.REFUSED:
            continue
        if facts.action not in decision.RETURNS or run.attempt(facts.number).asked.exists():
            return facts
        if facts.progress:
            return None
    return None


def keep(run: RunDir) -> None:
    """Keep what was asked so far, for a request that takes its place."""
    if last := ledger.last(run):
        folder = run.attempt(of(run, last).number)
        for path, kept in ((run.job, folder.asked), (run.script, folder.asked_script)):
            with contextlib.suppress(FileNotFoundError):  # a run that `hpcddp run` made
                if not kept.exists():
                    write_bytes(kept, path.read_bytes())


def put_back(run: RunDir, number: int) -> None:
    """Let the run be asked for what it was before the request of this attempt."""
    if earlier := before(run, number):
        folder = run.attempt(earlier.number)
        for path, kept, mode in (
            (run.job, folder.asked, 0o644),
            (run.script, folder.asked_script, 0o755),
        ):
            with contextlib.suppress(OSError):  # how the attempt ended must be said all the same
                write_bytes(path, kept.read_bytes(), mode)
