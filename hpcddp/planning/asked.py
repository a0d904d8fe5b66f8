"""Between steps 2 and 3: the values of a job, with those of its cluster below them.

Each value is right by itself. Whether they fit together is not checked yet: checks.py does that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hpcddp.errors import SlurmUnreachable
from hpcddp.planning import clusters, jobfile
from hpcddp.planning.clusters import Profile
from hpcddp.planning.jobfile import Layer
from hpcddp.sizes import NodeRange, parse_gpus, parse_nodes
from hpcddp.slurm import rules as site_rules
from hpcddp.slurm import sbatch
from hpcddp.slurm.rules import Site
from hpcddp.spec import JobSpec


class Asked(NamedTuple):
    """A job's values, the source of each that was set, and the size of the job.

    Args:
        gpus: of one node.
        notes: for the user.
    """

    spec: JobSpec
    sources: dict[str, str]
    profile: Profile
    nodes: NodeRange
    gpus: int
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, layers: list[Layer], notes: list[str], environ: Mapping[str, str]) -> Asked:
        """Merge layers of values, the highest precedence first; the cluster's come below them."""
        above, _ = jobfile.merge(layers)
        backend, more = _resolve(above.cluster)
        profile = clusters.load(backend, environ)
        job, sources = jobfile.merge([*layers, profile.layer()])
        sources.setdefault("nodes", "default")
        sources.setdefault("gpus", "default")
        job.cluster = profile.name if above.cluster in ("auto", profile.name) else str(profile.path)
        nodes = parse_nodes(job.nodes, where=sources["nodes"])
        gpus = parse_gpus(job.gpus, where=sources["gpus"])
        return cls(job, sources, profile, nodes, gpus, (*notes, *more))

    @property
    def backend(self) -> str:
        return self.profile.cluster.backend

    def site(self) -> Site | None:
        """Ask Slurm for its rules and those of the job's partition; None without an answer."""
        if self.backend != "slurm":
            return None
        try:
            return site_rules.read(str(self.spec.slurm.get("partition", "")).partition(",")[0])
        except SlurmUnreachable:
            return None


def _resolve(cluster: str) -> tuple[str, list[str]]:
    """The cluster that `auto` stands for, Slurm if sbatch answers and else this machine; a note."""
    if cluster != "auto":
        return cluster, []
    if sbatch.answers():
        return "slurm", []
    return "local", ["sbatch does not answer here: running on this machine"]
