"""Step 13: all runs of a folder as JSON, looked at as rarely as it can be, however many ask.

A run that has ended is read once, and again when its files change. Slurm is asked for all runs at
once, beside the looks; between two answers the run dirs tell.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp import report
from hpcddp.dashboard.answers import Answer, Paced, answer
from hpcddp.dashboard.speed import Newest
from hpcddp.errors import HpcddpError, RunError
from hpcddp.observe.poll import SlurmStates
from hpcddp.observe.run_facts import static
from hpcddp.observe.viewer import Viewer
from hpcddp.rundir import RunDir
from hpcddp.submit import status
from hpcddp.submit.status import Status

VIEWERS = 32  # runs whose curves are held at most,
IDLE = 300.0  # and so many seconds after they were last asked for
MOVING = ("now", "held_s", "efficiency")  # grow while nothing happens
TOLD = 60  # seconds after which that is sent all the same


class Mark(NamedTuple):
    """By which is seen whether a run has changed that has ended."""

    attempt: int
    stamp: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, run: RunDir) -> Mark:
        """A run's now."""
        attempt = max((folder.number for folder in run.all_attempts()), default=0)
        return cls(attempt, stamp(run, attempt))

    def holds(self, run: RunDir) -> bool:
        """Whether the run is as it was."""
        return self.stamp == stamp(run, self.attempt)


class Folder:
    """The runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._all = Paced(self._list)
        self._slurm = SlurmStates(aside=True)
        self._runs: dict[str, RunDir] = {}  # by the name that is shown and asked for
        self._ended: dict[str, tuple[Mark, dict[str, Any]]] = {}
        self._newest: dict[str, Newest] = {}
        self._views: OrderedDict[tuple[str, int], Paced] = OrderedDict()
        self._lock = threading.Lock()  # of the views

    def runs(self) -> Answer:
        """All runs, newest first."""
        return self._all.get()

    def run(self, name: str) -> Answer:
        """All that is shown of one run.

        Raises:
            KeyError: no run of the folder has the name.
            RunError: it is damaged, or was removed.
        """
        if name not in self._runs:
            self.runs()
        run = self._runs.get(name)
        try:
            # A new folder of the same name is another run.
            key = name, run.path.stat().st_ino if run else 0
        except OSError:
            run = None
        if run is None:
            raise RunError("there is no such run in this folder (any more)", where=name)
        with self._lock:
            if key not in self._views:
                self._views[key] = Paced(Page(run, self._slurm).make)
            self._views.move_to_end(key)
            found = self._views[key]
            if len(self._views) > VIEWERS:
                self._views.popitem(last=False)
        return found.get()

    def forget(self) -> None:
        """Let go of the curves of runs that nobody looks at any more."""
        old = time.monotonic() - IDLE
        with self._lock:
            for key in [key for key, paced in self._views.items() if paced.asked < old]:
                del self._views[key]

    def _list(self) -> Answer:
        found, outside = scan(self.root)
        self._runs = {shown(run.name): run for run in found}
        for name in (self._ended.keys() | self._newest.keys()) - self._runs.keys():
            self._ended.pop(name, None)
            self._newest.pop(name, None)
        rows = [self._row(name, run) for name, run in self._runs.items()]
        self._slurm.ask([run for run in found if shown(run.name) not in self._ended])
        told = {"schema_version": 1, "folder": str(self.root), "runs": rows, "outside": outside}
        return answer(told | {"away": self._slurm.away})

    def _row(self, name: str, run: RunDir) -> dict[str, Any]:
        held = self._ended.get(name)
        if held and held[0].holds(run):
            return held[1]
        self._ended.pop(name, None)
        try:
            mark, found = Mark.of(run), status.known(run)
            ended = found.final and found.state not in status.UNTOLD
            found = found if ended else self._slurm.of(run, found)
            newest = self._newest.setdefault(name, Newest(run))
            newest.update(whole=not found.final)
            made = row(name, found, newest)
        except Exception as error:  # whatever lies in one folder must not hide the others
            what = error.what if isinstance(error, HpcddpError) else f"it cannot be read: {error}"
            damaged = Status(name, "DAMAGED", str(run.path), None, "", "", 0, 0.0, 0, reason=what)
            return row(name, damaged, None)
        if ended:
            self._ended[name] = mark, made
            del self._newest[name]
        return made


COLUMNS = ("state", "reason", "since", "created", "nodes", "gpus_per_node", "hosts", "job_id",
           "backend", "attempt", "step", "total_steps", "epoch", "loss", "stale")  # fmt: skip


def row(name: str, found: Status, newest: Newest | None) -> dict[str, Any]:
    """A run's row of the list."""
    made: dict[str, Any] = {"run": name} | {column: getattr(found, column) for column in COLUMNS}
    made |= {"samples_per_s": None, "to_go_s": None, "slow": 0}
    if newest:
        made["samples_per_s"] = newest.samples_per_s
        if found.state == "RUNNING":
            made["slow"] = newest.slow
            if newest.step_s and found.total_steps:
                made["to_go_s"] = newest.step_s * max(0, found.total_steps - found.step)
    return made


def scan(root: Path) -> tuple[list[RunDir], int]:
    """The runs of a folder, newest first, and how many links to runs lead out of it.

    What lies elsewhere is not shown: it is not of this folder, whoever made the link.
    """
    dated, outside = [], 0
    inside = root.resolve()
    with os.scandir(root) as entries:
        for entry in entries:
            try:
                when = Path(entry.path, "job.json").stat().st_mtime_ns
                if not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(inside):
                    dated.append((when, entry.name))
                else:
                    outside += 1
            except (OSError, RuntimeError):  # no run, or not ours to read; a loop of links
                continue
    return [RunDir(root / name) for _, name in sorted(dated, reverse=True)], outside


def shown(name: str) -> str:
    """A file's name as text, which may be no text."""
    return os.fsencode(name).decode("utf-8", "replace")


def stamp(run: RunDir, attempt: int) -> tuple[tuple[int, int], ...]:
    """The files that tell a run's end: when each was written, and which file it is."""
    return tuple(
        _written(path)
        for path in (run.path, run.job, run.submission, run.attempts, run.attempt(attempt).facts)
    )


def _written(path: Path) -> tuple[int, int]:
    """When, and as which file: a clock may stand still between two that are written."""
    try:
        facts = path.stat()
        return facts.st_mtime_ns, facts.st_ino
    except OSError:
        return 0, 0


class Page:
    """All that is shown of a run; its lines are read once each, and of an ended one no more."""

    def __init__(self, run: RunDir, slurm: SlurmStates) -> None:
        self.run, self._slurm = run, slurm
        self._viewer = Viewer(run)
        self._ended: tuple[Mark, Answer] | None = None

    def make(self) -> Answer:
        """The run now.

        Raises:
            RunError: it is damaged.
        """
        if self._ended and self._ended[0].holds(self.run):
            return self._ended[1]
        self._ended = None
        try:
            return self._make()
        except HpcddpError:
            raise
        except Exception as error:  # of records that are no records of ours
            raise RunError(f"cannot be shown: {error!r}", where=str(self.run.path)) from error

    def _make(self) -> Answer:
        mark, found = Mark.of(self.run), status.known(self.run)
        ended = found.final and found.state not in status.UNTOLD
        view = self._viewer.look(self._slurm.of(self.run, found))
        data = report.shown([view.to_dict() | static(self.run)])
        still = {name: value for name, value in data["runs"][0].items() if name not in MOVING}
        made = answer(data, [view.now // TOLD, still])
        if ended:
            self._ended, self._viewer = (mark, made), Viewer(self.run)  # its curves take memory
        return made
