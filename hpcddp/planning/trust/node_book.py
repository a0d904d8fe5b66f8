"""The histories of a cluster's nodes: a folder beside the profile, with one file for each node.

    NAME.nodes/
      HOST.json   what happened on a node
      runs        the runs to gather from, the newest last; RUN_* for the elements of an array
      .lock       held while one of these files is changed

Runs write into their own folder alone. A new job's command gathers what they wrote. Gathering twice
adds nothing, so commands may do it at the same time, and a file that was damaged fills again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpcddp.attempt.nodes import node_events
from hpcddp.attempt.nodes.node_events import NodeEvent
from hpcddp.planning import clusters
from hpcddp.planning.clusters import Profile
from hpcddp.planning.trust import node_history
from hpcddp.planning.trust.node_history import NodeHistory
from hpcddp.rundir import RunDir, write_text
from hpcddp.slurm.hostlist import CHARACTERS

RUNS = 200  # newest runs to gather from
SANDBOX = "sandbox"  # the name of the book of all sandboxes
PATIENCE = 3.0  # seconds to wait for the lock


class NodeBook:
    """The histories of the nodes of one cluster, for one user.

    Args:
        path: its folder, which may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs = path / "runs"

    @classmethod
    def of(cls, profile: Profile, environ: Mapping[str, str]) -> NodeBook:
        """The book of a profile's cluster, in the user's folder of profiles. A sandbox has one of
        its own: its nodes are none of the cluster's."""
        return cls.named(SANDBOX if environ.get("HPCDDP_SANDBOX") else profile.path.stem, environ)

    @classmethod
    def named(cls, name: str, environ: Mapping[str, str]) -> NodeBook:
        """The book of a profile's name."""
        return cls(clusters.folders(environ)[0] / f"{name}.nodes")

    def remove(self) -> None:
        """Forget all nodes and runs."""
        shutil.rmtree(self.path, ignore_errors=True)

    def histories(self) -> list[NodeHistory]:
        """All nodes with a history, by name."""
        return [node_history.load(path) for path in sorted(self.path.glob("*.json"))]

    def register(self, run: RunDir, *, array: bool) -> None:
        """Note a run, so that what it meets is gathered; without a disk to write to it is not."""
        line = f"{run.path}{'_*' if array else ''}\n"
        with contextlib.suppress(OSError), self._changed(), self._runs.open("a") as file:
            file.write(line)

    def gather(self) -> None:
        """Take over what the noted runs have recorded."""
        if not self._runs.exists():
            return
        events: dict[str, list[NodeEvent]] = {}
        for event in self._recorded():
            events.setdefault(event.host, []).append(event)
        with contextlib.suppress(OSError), self._changed():
            for host, new in events.items():
                self._update(host, new)
            self._shorten()

    def add(self, events: Iterable[NodeEvent]) -> None:
        """Add events that no run records."""
        with self._changed():
            for event in events:
                self._update(event.host, [event])

    def forgive(self, host: str, now: float) -> None:
        """Use a node again, and forget its failures."""
        with self._changed():
            history = node_history.load(self._file(host))
            history.forgiven, history.wanted = now, 0.0
            node_history.save(history, self._file(host))

    def leave_out(self, host: str, until: float) -> None:
        """Leave a node out until then, in seconds since the epoch."""
        with self._changed():
            history = node_history.load(self._file(host))
            history.wanted = until
            node_history.save(history, self._file(host))

    def _file(self, host: str) -> Path:
        return self.path / f"{host}.json"

    def _update(self, host: str, events: Iterable[NodeEvent]) -> None:
        if host.strip(CHARACTERS) or host.startswith("."):  # no name of a host
            return
        history = node_history.load(self._file(host))
        if history.add(events):
            node_history.save(history, self._file(host))

    def _recorded(self) -> Iterator[NodeEvent]:
        """The events in the folders of the noted runs."""
        for name in self._noted()[-RUNS:]:
            folder = Path(name)
            paths = folder.parent.glob(folder.name) if name.endswith("_*") else [folder]
            for path in paths:
                with contextlib.suppress(OSError), RunDir(path).node_events.open("rb") as file:
                    yield from node_events.read(file)

    def _noted(self) -> list[str]:
        with contextlib.suppress(OSError):
            return self._runs.read_text(encoding="utf-8", errors="replace").splitlines()
        return []

    def _shorten(self) -> None:
        """Forget old runs, now and then."""
        names = self._noted()
        if len(names) > 2 * RUNS:
            write_text(self._runs, "".join(f"{name}\n" for name in names[-RUNS:]))

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Hold the folder's lock, where the file system has locks."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _wait_for(lock)
            yield
        finally:
            os.close(lock)


def _wait_for(lock: int) -> None:
    """Take a file's lock, or go on without it: some file systems have none, and what is lost by two
    commands at once is gathered again by the next one."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
        else:
            return
