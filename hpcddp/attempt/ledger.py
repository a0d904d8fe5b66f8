"""History of attempts: which one works in a run dir, when each life began, and how it ended.

An attempt is a folder that is renamed into place with its facts inside, so that of two lives that
begin at once only one gets the number. The batch script alone writes attempt.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.attempt.fence import fence
from hpcddp.errors import HpcddpError, RunError, RunUnreadable
from hpcddp.processes import start_of
from hpcddp.rundir import (
    AttemptDir,
    RunDir,
    read_json,
    read_step,
    step_folders,
    step_of,
    token,
    write_json,
)

Close = Callable[["Attempt"], None]


@dataclass
class Attempt:
    """One life of a run, as attempt.json holds it."""

    number: int
    job_id: str  # Slurm's, A_N for an array's element, or the process id of the local script
    host: str  # where the batch script runs
    pid: int
    pid_start: str  # the process's start, in clock ticks since boot: a pid alone is no identity
    slurm: bool
    nodes: str  # host list of the allocation
    began: float  # seconds since the epoch
    said: str = ""  # the log that holds Slurm's words on why it ends the job
    said_size: int = 0  # bytes of it at the start: what comes after them is of this life
    said_id: str = ""  # the job's number in these words, which an array's element has besides
    node_log: str = ""  # on ``host``, where Slurm writes them; the sentry copies them into ``said``
    node_log_size: int = 0  # bytes of it that were there, or copied, at the start
    restarts: int = 0  # how often Slurm had restarted the job when this life began
    deadline: float | None = None  # end of the time limit, in seconds since the epoch
    site: dict[str, Any] = field(default_factory=dict)  # of rules.Site
    checkpoint: int | None = 0  # step of the newest complete checkpoint at its start, if known
    ended: float | None = None
    exit_code: int | None = None  # the ranks'
    cause: str | None = None  # why it ended, and what was done about it: see decision.py
    action: str = ""
    reason: str = ""
    saved: int | None = 0  # step of the newest complete checkpoint at its end, if known
    gained: bool | None = None  # whether it saved any itself, if known
    successor: str = ""  # the job that goes on, where it is another one
    exclude: str = ""  # host list that its next life is to leave out

    @property
    def live(self) -> bool:
        """Whether it has not said that it ended; its process may be gone all the same."""
        return self.cause is None

    @property
    def progress(self) -> bool:
        """Whether it got the run any further, or may have: what could not be read is not known."""
        if self.gained is not None:
            return self.gained
        if self.checkpoint is None or self.saved is None:
            return True
        return self.saved > self.checkpoint  # an attempt of an earlier version

    def measure(self, run: RunDir) -> Attempt:
        """Fill in what it came to; the attempt itself."""
        newest = newest_save(run)
        if newest:
            self.saved, self.gained = newest.step, newest.attempt == self.number
        else:  # one that took no step has saved none
            self.saved, self.gained = (
                None,
                None if read_step(run.attempt(self.number))[0] else False,
            )
        return self


def life(job_id: str, pid: int, *, slurm: bool = False, nodes: str = "") -> Attempt:
    """The facts of a life that begins now on this host; `begin` gives it its number."""
    host = os.uname().nodename
    return Attempt(0, job_id, host, pid, start_of(pid), slurm, nodes, time.time())


def read(folder: AttemptDir) -> Attempt | None:
    """The facts of one attempt."""
    data = read_json(folder.facts)
    try:
        return Attempt(**data) if data else None
    except TypeError as error:
        raise RunError(f"is damaged: {error}", where=str(folder.facts)) from None


def attempts(run: RunDir) -> list[Attempt]:
    """All attempts, oldest first."""
    return [facts for folder in run.all_attempts() if (facts := read(folder))]


def last(run: RunDir) -> Attempt | None:
    """The newest attempt."""
    folders = run.all_attempts()
    return read(folders[-1]) if folders else None


def begin(
    run: RunDir, facts: Attempt, works: Callable[[Attempt], bool], close: Close = lambda a: None
) -> Attempt | None:
    """Take the next attempt number; None if an earlier attempt still works.

    From then on no earlier one can publish a checkpoint or a result, whether it works or not.

    Args:
        facts: this life; its number and its checkpoint are filled in here.
        works: whether an attempt without an end is still at work.
        close: says how an attempt ended that could not say so itself.
    """
    while True:
        folders = run.all_attempts()
        earlier = read(folders[-1]) if folders else None
        if earlier and earlier.live and works(earlier):
            return None
        facts.number = folders[-1].number + 1 if folders else 1  # one may be without facts
        if not _take(run, facts):  # another life has the number
            continue
        fence(run, facts.number)
        with contextlib.suppress(OSError, RunUnreadable):  # the number is ours, on a full disk too
            if earlier and earlier.live:
                close(earlier)
                earlier.measure(run)
                write_json(folders[-1].facts, asdict(earlier))
            facts.checkpoint = newest_step(run)
            _learn(run, folders)
            write_json(run.attempt(facts.number).facts, asdict(facts))
            point(run.log, Path("attempts", str(facts.number), "log"))
        return facts


def _take(run: RunDir, facts: Attempt) -> bool:
    """Make an attempt's folder; false if there is one of its number.

    Raises:
        OSError: the disk is full, or away.
    """
    aside, target = run.attempts / f".{facts.number}.{os.getpid()}.{token(3)}", str(facts.number)
    try:
        aside.mkdir()
        write_json(aside / "attempt.json", asdict(facts))
        (aside / "log").touch()
        (aside / "sending").mkdir()  # here alone: once a newer attempt took it, it is gone
        aside.rename(run.attempts / target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if (run.attempts / target).exists():
            return False
        raise
    return True


def point(link: Path, target: Path) -> None:
    """Make or replace a symbolic link, atomically."""
    aside = link.with_name(f".{link.name}.{token(3)}")
    aside.symlink_to(target)
    aside.replace(link)


def end(
    run: RunDir, number: int, exit_code: int, cause: str, action: str = "", reason: str = ""
) -> Attempt | None:
    """Write how an attempt ended; None if it is the newest no more. ``owner`` says what is
    raised."""
    facts = owner(run, number)
    if facts:
        facts.ended, facts.exit_code, facts.cause = time.time(), exit_code, cause
        facts.action, facts.reason = action, reason
        facts.measure(run)
        write_json(run.attempt(number).facts, asdict(facts))
    return facts


def owner(run: RunDir, number: int) -> Attempt | None:
    """The facts of an attempt while it is the newest: it alone may write. None if a newer one has
    begun.

    Raises:
        RunUnreadable: neither of them is there: the disk may be away.
    """
    folders = run.all_attempts()
    if not folders or folders[-1].number < number:
        raise RunUnreadable("is not there", where=str(run.attempt(number).path))
    return read(folders[-1]) if folders[-1].number == number else None


def refreshed(run: RunDir, mine: Attempt) -> Attempt:
    """An attempt's facts, with what its sentry has learned since."""
    with contextlib.suppress(HpcddpError):
        news = read_json(run.attempt(mine.number).slurm) or {}
        return replace(mine, **{name: news[name] for name in ("deadline", "site") if name in news})
    return mine


class Save(NamedTuple):
    """A checkpoint that is marked complete, and the attempt that did it."""

    attempt: int
    step: int


def newest_step(run: RunDir) -> int | None:
    """The step of the newest checkpoint that is marked complete; 0 if there is none, None if that
    cannot be read."""
    newest = newest_save(run)
    return newest.step if newest else None


def newest_save(run: RunDir) -> Save | None:
    """The newest attempt's newest checkpoint: a damaged one of an older attempt may have a higher
    step. Zeros if there is none, None if that cannot be read. An older one that cannot be read is
    of no importance."""
    saves, unknown = [Save(0, 0)], -1
    try:
        for path in step_folders(run.checkpoints):
            try:
                saves += filter(None, [_save(path)])
            except OSError:
                unknown = max(unknown, step_of(path) or 0)
    except OSError:
        return None
    newest = max(saves)
    return newest if unknown < newest.step or unknown < 0 else None


def _save(checkpoint: Path) -> Save | None:
    """What a checkpoint's COMPLETE says; None if it has none."""
    by = 0  # an earlier version's does not tell
    try:
        by = json.loads((checkpoint / "COMPLETE").read_text(encoding="utf-8")).get("attempt", 0)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, AttributeError, RecursionError):
        pass
    return Save(by if isinstance(by, int) else 0, step_of(checkpoint) or 0)


def _learn(run: RunDir, folders: list[AttemptDir]) -> None:
    """Fill in what earlier attempts could not know at their ends, as far as it can be seen now."""
    newest = newest_save(run)
    for folder in reversed(folders):
        facts = read(folder)
        if newest is None or facts is None or facts.saved is not None:
            return
        if newest.attempt <= facts.number:  # else what it saved is gone
            facts.saved, facts.gained = newest.step, newest.attempt == facts.number
            write_json(folder.facts, asdict(facts))


def progress_of(run: RunDir, mine: Attempt) -> bool:
    """Whether an attempt that has no end yet got the run any further."""
    return replace(mine).measure(run).progress
