"""What Slurm says of the cluster when a job is planned: three calls, none for each node."""

from __future__ import annotations

from dataclasses import dataclass

from hpcddp.errors import SlurmUnreachable
from hpcddp.planning.site import node_choice
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
    """

    site: Site | None = None
    partitions: tuple[Partition, ...] = ()
    kinds: tuple[NodeKind, ...] = ()
    counts_memory: bool = False
    default_memory: tuple[str, int] = ("", 0)

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


def read(job: JobSpec, config: dict[str, str] | None = None) -> ClusterNow:
    """Ask Slurm.

    Args:
        config: its configuration, if it has been read.
    """
    clusters = str(job.slurm.get("clusters", ""))
    if "," in clusters:
        return ClusterNow()  # Slurm chooses one
    with other_clusters.asked(clusters):
        return _read(job, None if clusters else config)


def _read(job: JobSpec, config: dict[str, str] | None) -> ClusterNow:
    try:
        said = rules.config() if config is None else config
        rows = partitions.ask()
    except SlurmUnreachable:
        return ClusterNow()
    name = str(job.slurm.get("partition", "")).partition(",")[0]
    site = rules.of(said, rows, name)
    try:
        kinds = tuple(node_kinds.read())
    except SlurmUnreachable:
        kinds = ()
    counts = "MEMORY" in said.get("SelectTypeParameters", "").upper()
    counts = counts and "cons" in said.get("SelectType", "")
    return ClusterNow(
        site, tuple(partitions.parse(rows)), kinds, counts, partitions.default_memory(said)
    )
