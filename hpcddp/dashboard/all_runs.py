"""Step 13: all runs of a folder as JSON, read as rarely as possible for any number of browsers.

A run that has ended is read once, and again when its files change. A thread asks Slurm for all runs
at once; between two answers the run folders give the state.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp import report
from hpcddp.dashboard.answers import Answer, CachedAnswer, answer
from hpcddp.dashboard.speed import Newest
from hpcddp.errors import HpcddpError, RunError
from hpcddp.observe.poll import SlurmStates
from hpcddp.observe.run_facts import static
from hpcddp.observe.viewer import Viewer, unreadable
from hpcddp.rundir import RunDir
from hpcddp.submit import status, times
from hpcddp.submit.status import Status

VIEWERS = 32  # runs at most whose curves stay in memory
IDLE = 300.0  # seconds after the last request for which they stay
MOVING = ("now", "held_s", "efficiency")  # change with time alone
MINUTE = 60  # seconds after which these are sent again


class Mark(NamedTuple):
    """A stamp of the files of an ended run, which shows whether it has changed."""

    attempt: int
    stamp: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, run: RunDir) -> Mark:
        """The mark of a run now."""
        attempt = max((folder.number for folder in run.all_attempts()), default=0)
        return cls(attempt, stamp(run, attempt))

    def holds(self, run: RunDir) -> bool:
        """Whether the run is unchanged."""
        return self.stamp == stamp(run, self.attempt)


class Folder:
    """The runs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._all = CachedAnswer(self._list)
        self._slurm = SlurmStates(aside=True)
        self._runs: dict[str, RunDir] = {}  # by the name in the list and in addresses
        self._ended: dict[str, tuple[Mark, dict[str, Any]]] = {}
        self._newest: dict[str, Newest] = {}
        self._pages: OrderedDict[tuple[str, int], CachedAnswer] = OrderedDict()
        self._lock = threading.Lock()  # of the pages

    def runs(self) -> Answer:
        """All runs, newest first."""
        return self._all.get()

    def run(self, name: str) -> Answer:
        """The page of one run.

        Raises:
            RunError: no run of the folder has the name, or the run is damaged.
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
            raise RunError("no such run in this folder, or not any more", where=name)
        with self._lock:
            if key not in self._pages:
                self._pages[key] = CachedAnswer(Page(run, self._slurm).make)
            self._pages.move_to_end(key)
            page = self._pages[key]
            if len(self._pages) > VIEWERS:
                self._pages.popitem(last=False)
        return page.get()

    def forget(self) -> None:
        """Drop the pages, with their curves, that no browser has asked for lately."""
        old = time.monotonic() - IDLE
        with self._lock:
            for key in [key for key, page in self._pages.items() if page.asked < old]:
                del self._pages[key]

    def _list(self) -> Answer:
        runs, outside = scan(self.root)
        self._runs = {shown(run.name): run for run in runs}
        for name in (self._ended.keys() | self._newest.keys()) - self._runs.keys():
            self._ended.pop(name, None)
            self._newest.pop(name, None)
        rows = [self._row(name, run) for name, run in self._runs.items()]
        self._slurm.ask([run for run in runs if shown(run.name) not in self._ended])
        data = {"schema_version": 1, "folder": str(self.root), "runs": rows, "outside": outside}
        return answer(data | {"away": self._slurm.away})

    def _row(self, name: str, run: RunDir) -> dict[str, Any]:
        held = self._ended.get(name)
        if held and held[0].holds(run):
            return held[1]
        self._ended.pop(name, None)
        try:
            mark, state = Mark.of(run), status.known(run)
            ended = state.final and state.state not in status.UNTOLD
            state = state if ended else self._slurm.of(run, state)
            newest = self._newest.setdefault(name, Newest(run))
            newest.update(whole=not state.final)
            line = row(name, state, newest)
        except Exception as error:  # a damaged folder must not hide the others
            why = error.what if isinstance(error, HpcddpError) else f"cannot be read: {error}"
            damaged = Status(name, "DAMAGED", str(run.path), None, "", "", 0, 0.0, 0, reason=why)
            return row(name, damaged, None)
        if ended:
            self._ended[name] = mark, line
            del self._newest[name]
        return line


COLUMNS = ("state", "reason", "since", "created", "nodes", "gpus_per_node", "hosts", "job_id",
           "backend", "attempt", "step", "total_steps", "epoch", "loss", "stale")  # fmt: skip


def row(name: str, state: Status, newest: Newest | None) -> dict[str, Any]:
    """A run's row of the list."""
    cells: dict[str, Any] = {"run": name} | {column: getattr(state, column) for column in COLUMNS}
    cells |= {"samples_per_s": None, "to_go_s": None, "slow": 0}
    if state.since:  # a browser elsewhere needs the offset
        cells["since"] = times.iso(times.seconds(state.since))
    if newest:
        cells["samples_per_s"] = newest.samples_per_s
        if state.state == "RUNNING":
            cells["slow"] = newest.slow
            if newest.step_s and state.total_steps:
                cells["to_go_s"] = newest.step_s * max(0, state.total_steps - state.step)
    return cells


def scan(root: Path) -> tuple[list[RunDir], int]:
    """The runs of a folder, newest first, and the number of links to runs outside it.

    A run outside is not shown.
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
            except (OSError, RuntimeError):  # no run, or no permission; a loop of links
                continue
    return [RunDir(root / name) for _, name in sorted(dated, reverse=True)], outside


def shown(name: str) -> str:
    """A file's name as a string, also where its bytes are no UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def stamp(run: RunDir, attempt: int) -> tuple[tuple[int, int], ...]:
    """The files that change when a run ends: the time and the number of each."""
    return tuple(
        _written(path)
        for path in (run.path, run.job, run.submission, run.attempts, run.attempt(attempt).facts)
    )


def _written(path: Path) -> tuple[int, int]:
    """The time and the file's number: two writes may have the same time."""
    try:
        facts = path.stat()
        return facts.st_mtime_ns, facts.st_ino
    except OSError:
        return 0, 0


class Page:
    """The page of a run. Each line of the run is read once, and an ended run not again."""

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
        except Exception as error:  # records of another form
            raise unreadable(self.run, error) from error

    def _make(self) -> Answer:
        mark, state = Mark.of(self.run), status.known(self.run)
        ended = state.final and state.state not in status.UNTOLD
        view = self._viewer.look(self._slurm.of(self.run, state))
        data = report.shown([view.to_dict() | static(self.run)])
        still = {name: value for name, value in data["runs"][0].items() if name not in MOVING}
        page = answer(data, [view.now // MINUTE, still])
        if ended:
            self._ended, self._viewer = (mark, page), Viewer(self.run)  # its curves take memory
        return page
