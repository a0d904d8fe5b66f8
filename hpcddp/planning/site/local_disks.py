"""Before submission: folders of a job on a disk of this machine, which the nodes may not see.

The type of a file system tells (proc_pid_mountinfo(5)). It is no proof: a login node may serve its
own disk to the nodes. So there is no warning for what an earlier run used that began on the nodes,
and an error only for what a check-up found missing there. A job that has ended without an attempt
is no proof either, since it may never have started: the warning names its run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hpcddp import record
from hpcddp.errors import ClusterError, HpcddpError, TopologyError
from hpcddp.planning.site import site_facts
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.software import container_binds, software_facts, software_keys
from hpcddp.rundir import RunDir, read_json, runs_in
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import other_clusters
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import KEYS, JobSpec

LOCAL = {
    "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "tmpfs", "vfat",
    "xfs", "zfs",
}  # fmt: skip
TMP = Path("/tmp")  # each node has its own, and programs expect that
LATEST = 20  # runs of a folder that are looked at
ASKED = 3  # jobs that Slurm is asked about
# After the warning of the folder of the runs: a job that has ended, and the folder.
ENDED = (
    ", and {} has ended without an attempt\n"
    "  use a folder that all nodes see, or check this one with `hpcddp doctor --runs {}`"
)
# A line of mountinfo: the mount point, then the type behind the separator.
MOUNT = re.compile(r"^\S+ \S+ \S+ \S+ (?P<point>\S+) .* - (?P<type>\S+) ", re.MULTILINE)


def check(
    job: JobSpec, folder: Path, runs: Path, kinds: Sequence[NodeKind], facts: SiteFacts | None,
    environ: Mapping[str, str],
) -> list[str]:  # fmt: skip
    """A warning for each folder of a job that its nodes may not see.

    Args:
        folder: the folder of the submission.
        runs: the folder of the runs.
        kinds: the kinds of nodes that the job can land on; empty if unknown.
        facts: recorded with the profile, if there are any.
        environ: the user's.

    Raises:
        ClusterError: a check-up found one missing on nodes.
    """
    places = list(_folders(job, folder, runs))
    _refuse_unseen(places, facts)
    if not kinds or "HPCDDP_SANDBOX" in environ or _is_node(kinds):
        return []
    return list(_local(places, runs))


def check_again(job: JobSpec, folder: Path, runs: Path, profile: Path) -> None:
    """Check the folders of a run that is to continue.

    Args:
        profile: of its cluster.

    Raises:
        ClusterError: a check-up found one missing on nodes.
    """
    try:
        facts = site_facts.load(profile)
    except ClusterError:  # damaged: a note of the plan says so
        return
    _refuse_unseen(_folders(job, folder, runs), facts)


def _local(places: Iterable[tuple[str, Path]], runs: Path) -> Iterator[str]:
    """A warning for each folder on a disk of this machine, once for those below each other."""
    points = mounts()
    rows = [(what, path, _point(path, points)) for what, path in places]
    local = [row for row in rows if points.get(row[2]) in LOCAL]
    known = _used(runs) if local else set[Path]()
    for what, path, point in local:
        if not known & {path, *path.parents}:
            known.add(path)
            text = (
                f"the nodes may not see {what}: {path} is on a disk of this machine "
                f"({points[point]}, mounted at {point})"
            )
            lost = _without_attempt(runs) if path == runs else ""
            yield text + (ENDED.format(lost, shlex.quote(str(runs))) if lost else "")


def _without_attempt(runs: Path) -> str:
    """The newest job of the runs in this folder that has ended without an attempt, as far as Slurm
    knows; "" for none."""
    with contextlib.suppress(HpcddpError, OSError):  # Slurm does not answer
        for run, job_id in itertools.islice(_not_begun(runs), ASKED):
            job = record.read(run)
            with other_clusters.asked(job.clusters):
                row = slurm.job(job_id, job.name)
            if row is None or not (row.live or row.state == "CANCELLED"):
                return f"job {job_id} of {run.name}"
    return ""


def _not_begun(runs: Path) -> Iterator[tuple[RunDir, str]]:
    """The runs that Slurm has taken and that have no attempt, newest first, with their jobs. One
    that a person has asked to end does not count."""
    for run in runs_in(runs, most=LATEST):
        with contextlib.suppress(HpcddpError, OSError):
            submitted = read_json(run.submission) or {}
            taken = submitted.get("backend") == "slurm" and submitted.get("job_id")
            if taken and not run.all_attempts() and not run.request.exists():
                yield run, str(submitted["job_id"])


def _refuse_unseen(places: Iterable[tuple[str, Path]], facts: SiteFacts | None) -> None:
    """Refuse what a check-up found missing."""
    unseen = {Path(path) for path in facts.unseen} if facts else set[Path]()
    for what, path in places if unseen else ():
        real = Path(os.path.realpath(path))
        if gone := unseen & {real, *real.parents}:
            top = min(gone)
            raise ClusterError(
                f"the nodes do not see {what}: `hpcddp doctor` found {top} missing there",
                where=str(path),
                hint="use a folder that all nodes see; if they see this one by now, run "
                f"`hpcddp doctor --runs {shlex.quote(str(top))}`",
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


def _used(runs: Path) -> set[Path]:
    """The folders that the nodes see: those of the runs in this folder that began there."""
    used = set[Path]()
    for run in runs_in(runs, most=LATEST):
        with contextlib.suppress(HpcddpError, OSError):
            first = run.all_attempts()[:1]
            if any((read_json(attempt.facts) or {}).get("slurm") for attempt in first):
                used.add(runs)
                before = record.read(run)
                job = KEYS.build(KEYS.flatten(before.spec))
                used |= {path for _, path in _folders(job, Path(before.workdir), runs)}
    return used


def _folders(job: JobSpec, folder: Path, runs: Path) -> Iterator[tuple[str, Path]]:
    """What the nodes must see."""
    software, image = job.software, job.software.container.image
    yield "the folder of the runs", runs
    if not (job.command and job.snapshot):
        yield "the working folder", folder
    for path in dict.fromkeys(container_binds.data_folders(job, folder)):
        yield "its data", path
    for path in dict.fromkeys(container_binds.code_paths(job)):
        if path != TMP:
            yield "its code", path
    if not software.own_python:
        yield "the Python environment", Path(sys.prefix)
    if own := software_facts.environment(software):
        yield "the Python environment", Path(own)
    if "/" in software.conda:
        yield "the Python environment", Path(software.conda)
    if image and software_keys.is_path(software_keys.IMAGE, image):
        yield "the container image", Path(image)


def _point(path: Path, points: Mapping[str, str]) -> str:
    """The mount point of a path."""
    real = Path(os.path.realpath(path))
    return next((str(place) for place in (real, *real.parents) if str(place) in points), "/")
