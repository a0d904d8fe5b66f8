"""What Slurm says of the cluster when a job is planned: at most three calls, none for each node.

If `hpcddp cluster detect` has read the cluster, its configuration is known: two calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcddp.errors import ClusterError, SlurmUnreachable
from hpcddp.planning.site import node_choice, site_facts
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.slurm import node_kinds, other_clusters, partitions, rules
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.partitions import Partition
from hpcddp.slurm.rules import Site
from hpcddp.spec import JobSpec


@dataclass(frozen=True)
class ClusterNow:
    """The answers; each is empty without one.

    Args:
        site: the rules of Slurm and of the job's partition.
        partitions: all that there are, hidden ones too.
        kinds: of nodes, in all partitions.
        counts_memory: Slurm gives memory to jobs, as it does CPUs.
        default_memory: of a job in a partition without a default: (node or cpu, MB); ("", 0) for
            all of a node.
        config_read: as in Heard.
    """

    site: Site | None = None
    partitions: tuple[Partition, ...] = ()
    kinds: tuple[NodeKind, ...] = ()
    counts_memory: bool = False
    default_memory: tuple[str, int] = ("", 0)
    config_read: float = 0.0

    def kinds_for(self, job: JobSpec, gpus: int, kind: str = "") -> list[NodeKind]:
        """The kinds of nodes that a job can land on.

        Args:
            gpus: on each node.
            kind: type of the GPUs; "" for any.
        """
        routed = bool(self.site and self.site.routed)
        return node_choice.kinds_for(job, self.kinds, gpus, kind, routed=routed)

    def wanted(self, job: JobSpec) -> list[Partition]:
        """The partitions of a job that Slurm knows."""
        names = str(job.slurm.get("partition", "")).split(",")
        return [row for row in self.partitions
                if row.name in names or (names == [""] and row.default)]  # fmt: skip

    def cpu_limit(self, job: JobSpec) -> int | None:
        """Most CPUs of a node that the job's partitions give a job; None for no limit."""
        limits = [row.max_cpus_per_node for row in self.wanted(job)]
        return min((limit for limit in limits if limit), default=None)


class Heard(NamedTuple):
    """What Slurm has said of its cluster already.

    Args:
        config: by the names of slurm.conf(5).
        rows: of its partitions.
        config_read: when a detection read the configuration; 0 if Slurm was asked now.
    """

    config: dict[str, str]
    rows: str
    config_read: float = 0.0


def ask(profiles: Iterable[Path]) -> tuple[Path | None, Heard]:
    """The profile of this shell's cluster, and what Slurm says of the cluster.

    If the partitions are those that a detection read for one of the profiles, its configuration
    counts, and Slurm is not asked for it; one of the last day comes first. Otherwise the profile is
    None.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    rows = partitions.ask()
    known = {path: facts for path in profiles if (facts := _known(path, rows))}
    recent = {path: facts for path, facts in known.items() if not facts.old}
    for candidates in (recent, known):
        if len(candidates) == 1:
            ((path, facts),) = candidates.items()
            return path, Heard(facts.config, rows, facts.read)
    return None, Heard(rules.config(), rows)


def _known(profile: Path, rows: str) -> SiteFacts | None:
    """The facts that a detection read for a profile, if they have the configuration of a cluster
    with these partitions."""
    try:
        facts = site_facts.load(profile)
    except ClusterError:  # damaged: a note says so later
        return None
    if facts is None or facts.clusters or "SLURM_VERSION" not in facts.config:  # older version
        return None
    there = {(row.name, row.total_nodes) for row in partitions.parse(rows)}
    alike = there == {(row.name, row.total_nodes) for row in facts.partitions}
    return facts if alike else None


def read(job: JobSpec, heard: Heard | None = None, profile: Path | None = None) -> ClusterNow:
    """Ask Slurm for what it has not said already.

    Args:
        profile: of the cluster.
    """
    clusters = str(job.slurm.get("clusters", ""))
    if "," in clusters:
        return ClusterNow()  # Slurm chooses one
    with other_clusters.asked(clusters):
        try:
            if clusters or heard is None:
                _, heard = ask([] if clusters or profile is None else [profile])
        except SlurmUnreachable:
            return ClusterNow()
        return _read(job, *heard)


def _read(job: JobSpec, said: dict[str, str], rows: str, config_read: float) -> ClusterNow:
    name = str(job.slurm.get("partition", "")).partition(",")[0]
    site = rules.of(said, rows, name)
    try:
        kinds = tuple(node_kinds.read())
    except SlurmUnreachable:
        kinds = ()
    counts = "MEMORY" in said.get("SelectTypeParameters", "").upper()
    counts = counts and "cons" in said.get("SelectType", "")
    return ClusterNow(
        site, tuple(partitions.parse(rows)), kinds, counts, partitions.default_memory(said),
        config_read,
    )  # fmt: skip
