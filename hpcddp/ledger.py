"""History of attempts: who works in a run dir, when each life began, and how it ended.

An attempt is a folder that is renamed into place with its facts inside, so that of two lives that
begin at once only one gets the number. The batch script alone writes attempt.json.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcddp.errors import RunError
from hpcddp.rundir import AttemptDir, RunDir, fence, read_json, token, write_json

Close = Callable[["Attempt"], None]


@dataclass
class Attempt:
    """One life of a run, as attempt.json holds it."""

    number: int
    job_id: str  # Slurm's, or the process id of the local script
    host: str  # where the batch script runs
    pid: int
    pid_start: str  # the process's start, in clock ticks since boot: a pid alone is no identity
    slurm: bool
    nodes: str  # host list of the allocation
    began: float  # seconds since the epoch
    said: str = ""  # the log into which Slurm writes why it ends the job
    said_size: int = 0  # bytes of it at the start: what comes after them is of this life
    restarts: int = 0  # how often Slurm had restarted the job when this life began
    deadline: float | None = None  # end of the time limit, in seconds since the epoch
    site: dict[str, Any] = field(default_factory=dict)  # of site.Site
    checkpoint: int = 0  # step of the newest complete checkpoint at its start
    ended: float | None = None
    exit_code: int | None = None  # the ranks'
    cause: str | None = None  # why it ended, and what was done about it: see requeue.py
    action: str = ""
    reason: str = ""
    saved: int = 0  # step of the newest complete checkpoint at its end
    successor: str = ""  # the job that goes on, where it is another one

    @property
    def live(self) -> bool:
        """Whether it has not said that it ended; its process may be gone all the same."""
        return self.cause is None

    @property
    def progress(self) -> bool:
        """Whether it got the run any further."""
        return self.saved > self.checkpoint


def process_start(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty if it is gone (proc(5), stat)."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else rest[18]


def life(job_id: str, pid: int, *, slurm: bool = False, nodes: str = "") -> Attempt:
    """The facts of a life that begins now on this host; `begin` gives it its number."""
    host = os.uname().nodename
    return Attempt(0, job_id, host, pid, process_start(pid), slurm, nodes, time.time())


def read(folder: AttemptDir) -> Attempt | None:
    """The facts of one attempt."""
    data = read_json(folder.facts)
    try:
        return Attempt(**data) if data else None
    except TypeError as error:
        raise RunError(f"is damaged: {error}", where=str(folder.facts)) from None


def attempts(run: RunDir) -> list[Attempt]:
    """All attempts, oldest first."""
    return [found for folder in run.all_attempts() if (found := read(folder))]


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
        aside = run.attempts / f".{facts.number}.{os.getpid()}.{token(3)}"
        aside.mkdir()
        write_json(aside / "attempt.json", asdict(facts))
        (aside / "log").touch()
        (aside / "sending").mkdir()  # here alone: once a newer attempt took it, it is gone
        try:
            aside.rename(run.attempts / str(facts.number))
        except OSError:  # somebody else took the number
            shutil.rmtree(aside)
            continue
        fence(run, facts.number)
        if earlier and earlier.live:
            close(earlier)
            earlier.saved = max(earlier.saved, newest_step(run))
            write_json(folders[-1].facts, asdict(earlier))
        facts.checkpoint = newest_step(run)
        write_json(run.attempt(facts.number).facts, asdict(facts))
        point(run.log, Path("attempts", str(facts.number), "log"))
        return facts


def point(link: Path, target: Path) -> None:
    """Make or replace a symbolic link, atomically."""
    aside = link.with_name(f".{link.name}.{token(3)}")
    aside.symlink_to(target)
    aside.replace(link)


def end(
    run: RunDir, number: int, exit_code: int, cause: str, action: str = "", reason: str = ""
) -> Attempt | None:
    """Write how an attempt ended; None if it is not there, or is the newest no more."""
    facts = owner(run, number)
    if facts:
        facts.ended, facts.exit_code, facts.cause = time.time(), exit_code, cause
        facts.action, facts.reason, facts.saved = action, reason, newest_step(run)
        write_json(run.attempt(number).facts, asdict(facts))
    return facts


def owner(run: RunDir, number: int) -> Attempt | None:
    """The facts of an attempt while it is the newest: it alone may write."""
    folders = run.all_attempts()
    return read(folders[-1]) if folders and folders[-1].number == number else None


def newest_step(run: RunDir) -> int:
    """The step of the newest checkpoint that is marked complete; 0 if there is none."""
    marks = run.checkpoints.glob("step-*/COMPLETE")
    names = (mark.parent.name.removeprefix("step-") for mark in marks)
    return max((int(name) for name in names if name.isdecimal()), default=0)
