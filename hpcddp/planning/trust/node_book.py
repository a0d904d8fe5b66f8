"""The histories of a cluster's nodes: a folder beside the profiles, with one file for each node.

    NAME.nodes/   by the name that the user's profile of the cluster has
      HOST.json   what happened on a node
      runs        the runs to gather from, the newest last
      .lock       held while one of these files is changed

Runs write into their own folder alone. A new job's command gathers what they wrote. Gathering twice
adds nothing, so commands may do it at the same time, and a file that was damaged fills again. A run
whose script was given to `sbatch --array` has a folder RUN_N beside it for each task of the array.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.attempt.nodes import node_events
from hpcddp.attempt.nodes.node_events import NodeEvent
from hpcddp.errors import ClusterError, SlurmUnreachable
from hpcddp.planning import clusters
from hpcddp.planning.clusters import Profile
from hpcddp.planning.site import site_facts
from hpcddp.planning.trust import node_history
from hpcddp.planning.trust.node_history import NodeHistory
from hpcddp.rundir import RunDir, write_text
from hpcddp.slurm import other_clusters, rules
from hpcddp.slurm.hostlist import CHARACTERS

if TYPE_CHECKING:
    from hpcddp.planning.site.cluster_now import Heard

RUNS = 200  # newest runs to gather from
ELEMENTS = 1000  # newest elements of arrays among them
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
    def of(cls, profile: Profile, environ: Mapping[str, str], cluster: str = "") -> NodeBook:
        """The book of a cluster, in the user's folder of profiles. Clusters that share this folder
        have one each, and a sandbox too: its nodes are none of the cluster's.

        Args:
            profile: gives its name to the book of a cluster whose name is unknown.
            cluster: its name at Slurm; "" for that of the detection, if there was one.
        """
        if environ.get("HPCDDP_SANDBOX"):
            return cls.named(SANDBOX, environ)
        cluster = cluster or _detected(profile)
        plain = re.fullmatch(r"\w[\w.-]*", cluster)  # it becomes a file's name
        return cls.named(clusters.profile_name(cluster) if plain else profile.path.stem, environ)

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

    def up_to_date(self) -> list[NodeHistory]:
        """The same with what the noted runs have recorded since. Nothing is written."""
        rows = {row.host: row for row in self.histories()}
        for host, events in self._recorded().items():
            rows.setdefault(host, NodeHistory(host)).add(events)
        return [rows[host] for host in sorted(rows)]

    def register(self, run: RunDir) -> None:
        """Note a run, so that what it meets is gathered; without a disk to write to it is not."""
        with contextlib.suppress(OSError), self._changed(), self._runs.open("a") as file:
            file.write(f"{run.path}\n")

    def gather(self) -> None:
        """Take over what the noted runs have recorded."""
        if not self._runs.exists():
            return
        events = self._recorded()
        with contextlib.suppress(OSError), self._changed():
            for host, new in events.items():
                self._update(host, new)
            self._shorten()

    def add(self, events: Iterable[NodeEvent]) -> None:
        """Add events that no run records."""
        with self._changed():
            for host, new in _by_host(events).items():
                self._update(host, new)

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
        history = node_history.load(self._file(host))
        if history.add(events):
            node_history.save(history, self._file(host))

    def _recorded(self) -> dict[str, list[NodeEvent]]:
        """The events in the folders of the noted runs, by host."""
        runs = [Path(name) for name in self._noted()[-RUNS:]]
        events: list[NodeEvent] = []
        for folder in [*runs, *_elements(runs)]:
            with contextlib.suppress(OSError), RunDir(folder).node_events.open("rb") as file:
                events += node_events.read(file)
        return _by_host(events)

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


def cluster_of(profile: Profile, heard: Heard | None) -> str:
    """The name at Slurm of a profile's cluster; "" if it is unknown. Slurm is asked only about a
    cluster that was not detected.

    Args:
        heard: what Slurm has said of this shell's cluster, if it was asked.
    """
    other = str(profile.cluster.slurm.get("clusters", ""))
    if heard and not other:
        return heard.config.get("ClusterName", "")
    if (name := _detected(profile)) or "," in other:  # Slurm chooses one
        return name
    with contextlib.suppress(SlurmUnreachable), other_clusters.asked(other):
        return rules.config().get("ClusterName", "")
    return ""


def _detected(profile: Profile) -> str:
    """The name that a cluster had when it was detected; "" if it was not."""
    try:
        facts = site_facts.load(profile.path)
    except ClusterError:  # damaged: a note says so elsewhere
        return ""
    return facts.cluster if facts else ""


def _by_host(events: Iterable[NodeEvent]) -> dict[str, list[NodeEvent]]:
    """Events by their host; without those whose host is no name of one."""
    rows: dict[str, list[NodeEvent]] = {}
    for event in events:
        if not event.host.strip(CHARACTERS) and not event.host.startswith("."):
            rows.setdefault(event.host, []).append(event)
    return rows


def _elements(runs: Iterable[Path]) -> list[Path]:
    """The folders of elements of some runs, those of the last tasks; each parent is read once.
    Another user's folder is none."""
    tasks: list[tuple[int, Path]] = []
    names = {str(run) for run in runs}
    for parent in {run.parent for run in runs}:
        with contextlib.suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                run, _, task = entry.path.rpartition("_")
                if run in names and task.isdecimal() and _is_own(entry):
                    tasks.append((int(task), Path(entry.path)))
    return [path for _, path in sorted(tasks)[-ELEMENTS:]]


def _is_own(entry: os.DirEntry[str]) -> bool:
    is_folder = entry.is_dir(follow_symlinks=False)
    return is_folder and entry.stat(follow_symlinks=False).st_uid == os.geteuid()


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
