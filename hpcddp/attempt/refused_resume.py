"""A refused resume changes nothing: the run keeps its state, its job.json and its script.

If possible, a `resume` whose model does not fit the run's checkpoints is refused before anything is
changed. Else its first attempt finds out. For that, resume leaves a copy of job.json and script in
the folder of the last attempt; they are put back, and the next `resume` starts from them.
"""

from __future__ import annotations

import contextlib

from hpcddp.attempt import decision, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, write_bytes


def of(run: RunDir, last: Attempt) -> Attempt:
    """The attempt whose end is the run's: the newest, unless its resume was refused."""
    return (before(run, last.number) or last) if last.cause == decision.REFUSED else last


def before(run: RunDir, number: int) -> Attempt | None:
    """The attempt that ended the run before the resume of this one; None if the run was requeued,
    not resumed, and the user's code has changed since."""
    for facts in reversed(ledger.attempts(run)):
        if facts.number >= number or facts.cause == decision.REFUSED:
            continue
        if facts.action not in decision.RETURNS or run.attempt(facts.number).asked.exists():
            return facts
        if facts.progress:
            return None
    return None


def keep(run: RunDir) -> None:
    """Keep job.json and script before a resume replaces them."""
    if last := ledger.last(run):
        folder = run.attempt(of(run, last).number)
        for path, kept in ((run.job, folder.asked), (run.script, folder.asked_script)):
            with contextlib.suppress(FileNotFoundError):  # a run that `hpcddp run` made
                if not kept.exists():
                    write_bytes(kept, path.read_bytes())


def put_back(run: RunDir, number: int) -> None:
    """Restore job.json and script from before the resume of this attempt."""
    if earlier := before(run, number):
        folder = run.attempt(earlier.number)
        for path, kept, mode in (
            (run.job, folder.asked, 0o644),
            (run.script, folder.asked_script, 0o755),
        ):
            with contextlib.suppress(OSError):  # the attempt's end must be recorded all the same
                write_bytes(path, kept.read_bytes(), mode)
