"""The history of a run's attempts: which one is running, when each began, and how it ended.

An attempt is a folder that is renamed into place with its facts inside: of two attempts that begin
at once only one gets the number. Only the batch script writes attempt.json.
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
    """One attempt of a run, as in attempt.json."""

    number: int
    job_id: str  # Slurm's, A_N for an array's element, or the process id of the local script
    host: str  # where the batch script runs
    pid: int
    pid_start: str  # the process's start, in clock ticks since boot: a pid alone is no identity
    slurm: bool
    nodes: str  # host list of the allocation
    began: float  # seconds since the epoch
    said: str = ""  # the log with Slurm's messages on why it ends the job
    said_size: int = 0  # bytes of it at the start: later ones are about this attempt
    said_id: str = ""  # the job's number in the messages; array elements have another id too
    node_log: str = ""  # on ``host``, where Slurm writes them; the sentry copies them to ``said``
    node_log_size: int = 0  # bytes of it at the start, or already copied
    restarts: int = 0  # Slurm's count when this attempt began
    deadline: float | None = None  # end of the time limit, in seconds since the epoch
    site: dict[str, Any] = field(default_factory=dict)  # of rules.Site
    checkpoint: int | None = 0  # step of the newest complete checkpoint at its start, if known
    ended: float | None = None
    exit_code: int | None = None  # the ranks'
    cause: str | None = None  # why it ended; action: what followed; see decision.py
    action: str = ""
    reason: str = ""
    saved: int | None = 0  # step of the newest complete checkpoint at its end, if known
    gained: bool | None = None  # whether it saved any itself, if known
    successor: str = ""  # the follow-up job, if any
    exclude: str | None = None  # host list for the next attempt; None for the script's own
    node: str = ""  # Slurm's name of ``host``

    @property
    def release(self) -> str:
        """Slurm's version, such as 24.11.5; "" if unknown."""
        return str(self.site.get("version", ""))

    @property
    def allocation(self) -> tuple[str, int]:
        """The job's id and Slurm's count of its restarts: equal for attempts of one allocation."""
        return self.job_id, self.restarts

    @property
    def live(self) -> bool:
        """Whether no end is recorded; its process may have ended all the same."""
        return self.cause is None

    @property
    def progress(self) -> bool:
        """Whether it made progress; also true if that cannot be read."""
        if self.gained is not None:
            return self.gained
        if self.checkpoint is None or self.saved is None:
            return True
        return self.saved > self.checkpoint  # an attempt of an earlier version

    def measure(self, run: RunDir) -> Attempt:
        """Fill in its progress; returns itself."""
        newest = newest_save(run)
        if newest:
            self.saved = newest.step
            self.gained = newest.attempt == self.number and newest.gained
        else:  # without a step there is no checkpoint
            stepped = read_step(run.attempt(self.number))[0]
            self.saved, self.gained = None, None if stepped else False
        return self


def new_attempt(job_id: str, pid: int, *, slurm: bool = False, nodes: str = "") -> Attempt:
    """The facts of an attempt that begins now on this host; `begin` gives it a number."""
    host, node = os.uname().nodename, os.environ.get("SLURMD_NODENAME", "") if slurm else ""
    return Attempt(0, job_id, host, pid, start_of(pid), slurm, nodes, time.time(), node=node)


def read(folder: AttemptDir) -> Attempt | None:
    """The facts of one attempt."""
    data = read_json(folder.facts)
    try:
        hosts = (read_json(folder.hosts) or {}) if data else {}
        if data and "in_order" in hosts:  # with spares, not all nodes of the job
            data["nodes"] = ",".join(hosts["in_order"])
        return Attempt(**data) if data else None
    except TypeError as error:
        raise RunError(f"damaged file: {error}", where=str(folder.facts)) from None


def all_nodes(folder: AttemptDir) -> str:
    """The host list of an attempt's allocation, with its spares."""
    return str((read_json(folder.facts) or {}).get("nodes", ""))


def taken_before(folder: AttemptDir, back: int = 10) -> int | None:
    """The last step of at most so many attempts before this one; None without one."""
    numbers = range(max(1, folder.number - back), folder.number)
    before = (AttemptDir(folder.path.with_name(str(number))) for number in numbers)
    return max((read_step(other)[0] for other in before), default=None)


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
    """Take the next attempt number; None if an earlier attempt still runs.

    From then on no earlier attempt can publish a checkpoint or a result.

    Args:
        facts: the new attempt; its number and checkpoint are filled in here.
        works: whether an attempt without an end still runs.
        close: fills in the end of an attempt that could not record it.
    """
    while True:
        folders = run.all_attempts()
        earlier = read(folders[-1]) if folders else None
        if earlier and earlier.live and works(earlier):
            return None
        facts.number = folders[-1].number + 1 if folders else 1  # an old one may have no facts
        if not _take(run, facts):  # another attempt has the number
            continue
        fence(run, facts.number)
        with contextlib.suppress(OSError, RunUnreadable):  # the number is taken, on a full disk too
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
    """Create an attempt's folder; false if its number is taken.

    Raises:
        OSError: the disk is full, or does not answer.
    """
    aside, target = run.attempts / f".{facts.number}.{os.getpid()}.{token(3)}", str(facts.number)
    try:
        aside.mkdir()
        write_json(aside / "attempt.json", asdict(facts))
        (aside / "log").touch()
        (aside / "sending").mkdir()  # only here: a newer attempt removes it for good
        aside.rename(run.attempts / target)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if (run.attempts / target).exists():
            return False
        raise
    return True


def point(link: Path, target: Path) -> None:
    """Create or replace a symbolic link atomically."""
    aside = link.with_name(f".{link.name}.{token(3)}")
    aside.symlink_to(target)
    aside.replace(link)


def end(
    run: RunDir, number: int, exit_code: int, cause: str, action: str = "", reason: str = ""
) -> Attempt | None:
    """Record an attempt's end; None if it is superseded. Raises as ``owner``."""
    facts = owner(run, number)
    if facts:
        facts.ended, facts.exit_code, facts.cause = time.time(), exit_code, cause
        facts.action, facts.reason = action, reason
        facts.measure(run)
        write_json(run.attempt(number).facts, asdict(facts))
    return facts


def owner(run: RunDir, number: int) -> Attempt | None:
    """The facts of an attempt; None if it is superseded. Only the newest may write.

    Raises:
        RunUnreadable: it is missing: the disk may not answer.
    """
    folders = run.all_attempts()
    if not folders or folders[-1].number < number:
        raise RunUnreadable("not found", where=str(run.attempt(number).path))
    return read(folders[-1]) if folders[-1].number == number else None


def refreshed(run: RunDir, mine: Attempt) -> Attempt:
    """An attempt's facts, with those that its sentry has added."""
    with contextlib.suppress(HpcddpError):
        news = read_json(run.attempt(mine.number).slurm) or {}
        return replace(mine, **{name: news[name] for name in ("deadline", "site") if name in news})
    return mine


class Save(NamedTuple):
    """A complete checkpoint, and the attempt that saved it.

    Args:
        gained: whether it shows progress: not if it was saved at a failure, as the attempt's first.
    """

    attempt: int
    step: int
    gained: bool = True


def newest_step(run: RunDir) -> int | None:
    """The step of the newest complete checkpoint; 0 if there is none, None if unreadable."""
    newest = newest_save(run)
    return newest.step if newest else None


def newest_save(run: RunDir) -> Save | None:
    """The newest attempt's newest checkpoint: a damaged one of an older attempt may have a higher
    step. Zeros if there is none, None if unreadable. Unreadable older ones do not matter."""
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
    """A checkpoint's COMPLETE; None if it has none."""
    by, gained = 0, True  # in that of an earlier version
    try:
        mark = json.loads((checkpoint / "COMPLETE").read_text(encoding="utf-8"))
        by, gained = mark.get("attempt", 0), mark.get("gained") is not False
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, AttributeError, RecursionError):
        pass
    return Save(by if isinstance(by, int) else 0, step_of(checkpoint) or 0, gained)


def _learn(run: RunDir, folders: list[AttemptDir]) -> None:
    """Fill in the progress of earlier attempts that could not read it at their ends."""
    newest = newest_save(run)
    for folder in reversed(folders):
        facts = read(folder)
        if newest is None or facts is None or facts.saved is not None:
            return
        if newest.attempt <= facts.number:  # else its checkpoints are gone
            facts.saved, facts.gained = newest.step, newest.attempt == facts.number
            write_json(folder.facts, asdict(facts))


def progress_of(run: RunDir, mine: Attempt) -> bool:
    """Whether an attempt that has not ended made progress."""
    return replace(mine).measure(run).progress
