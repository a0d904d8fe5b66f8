"""Before submission: folders of a job on a disk of this machine, which the nodes may not see.

The type of a file system tells (proc_pid_mountinfo(5)). It is no proof: a login node may serve its
own disk to the nodes. So a job whose earlier runs began on the nodes gets no warning.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpcddp.errors import HpcddpError, TopologyError
from hpcddp.planning.software import container_binds
from hpcddp.rundir import read_json, runs_in
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import JobSpec

LOCAL = {
    "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "vfat",
    "xfs", "zfs",
}  # fmt: skip
LATEST = 20  # runs of a folder that are looked at
# A line of mountinfo: the mount point, then the type behind the separator.
MOUNT = re.compile(r"^\S+ \S+ \S+ \S+ (?P<point>\S+) .* - (?P<type>\S+) ", re.MULTILINE)


def warnings(
    job: JobSpec, folder: Path, runs: Path, kinds: Sequence[NodeKind], environ: Mapping[str, str]
) -> Iterator[str]:
    """A warning for each folder of a job that its nodes may not see.

    Args:
        folder: the folder of the submission.
        runs: the folder of the runs.
        kinds: the kinds of nodes that the job can land on; empty if unknown.
        environ: the user's.
    """
    if not kinds or "HPCDDP_SANDBOX" in environ or _is_node(kinds):
        return
    points = mounts()
    places = [(what, path, _point(path, points)) for what, path in _folders(job, folder, runs)]
    local = [row for row in places if points.get(row[2]) in LOCAL]
    if local and not _began(runs):
        for what, path, point in local:
            yield (
                f"the nodes may not see {what}: {path} is on a disk of this machine "
                f"({points[point]}, mounted at {point})"
            )


def mounts() -> dict[str, str]:
    """The mount points of this machine -> the types of their file systems; none if unknown."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {_unescaped(match["point"]): match["type"] for match in MOUNT.finditer(text)}


def _unescaped(word: str) -> str:
    """A path as it is: the kernel writes a blank as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word)


def _is_node(kinds: Sequence[NodeKind]) -> bool:
    """Whether this machine is one of the nodes."""
    here = os.uname().nodename.partition(".")[0]
    try:
        return any(here in expand_hosts(kind.hosts) for kind in kinds if kind.hosts)
    except TopologyError:
        return False


def _began(runs: Path) -> bool:
    """Whether a run in this folder has begun on the nodes: they see it."""
    for run in runs_in(runs, most=LATEST):
        with contextlib.suppress(HpcddpError, OSError):
            if any((read_json(first.facts) or {}).get("slurm") for first in run.all_attempts()[:1]):
                return True
    return False


def _folders(job: JobSpec, folder: Path, runs: Path) -> Iterator[tuple[str, Path]]:
    """What the nodes must see."""
    yield "the folder of the runs", runs
    if not (job.command and job.snapshot):
        yield "the working folder", folder
    for path in dict.fromkeys(container_binds.data_folders(job, folder)):
        yield "its data", path
    if not job.software.own_python:
        yield "the Python environment", Path(sys.prefix)


def _point(path: Path, points: Mapping[str, str]) -> str:
    """The mount point of a path."""
    real = Path(os.path.realpath(path))
    return next((str(place) for place in (real, *real.parents) if str(place) in points), "/")
