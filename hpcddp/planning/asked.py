"""Between steps 2 and 3: the merged values of a job and its cluster.

Each value is valid by itself. checks.py checks whether they fit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcddp.errors import SlurmUnreachable, UserError
from hpcddp.planning import clusters, jobfile
from hpcddp.planning.clusters import Profile
from hpcddp.planning.jobfile import Layer
from hpcddp.sizes import NodeRange, parse_gpus, parse_nodes
from hpcddp.slurm import rules as site_rules
from hpcddp.slurm import sbatch
from hpcddp.slurm.rules import Site
from hpcddp.spec import JobSpec


class Asked(NamedTuple):
    """A job's values, the source of each set value, and the size of the job.

    Args:
        gpus: per node.
        notes: for the user.
        slurm_missing: the cluster is this machine because Slurm was not found.
    """

    spec: JobSpec
    sources: dict[str, str]
    profile: Profile
    nodes: NodeRange
    gpus: int
    notes: tuple[str, ...] = ()
    slurm_missing: bool = False

    @classmethod
    def read(cls, layers: list[Layer], notes: list[str], environ: Mapping[str, str]) -> Asked:
        """Merge layers of values, the highest precedence first; the cluster's come last.

        Raises:
            UserError: the cluster or the size is invalid, an option requires Slurm, which was not
                found, or the command begins with a launcher of its own.
        """
        above, _ = jobfile.merge(layers)
        backend = _resolve(above.cluster)
        missing = above.cluster == "auto" and backend == "local"
        if missing:
            _refuse_slurm_options(layers)
        profile = clusters.load(backend, environ)
        job, sources = jobfile.merge([*layers, profile.layer()])
        sources.setdefault("nodes", "default")
        sources.setdefault("gpus", "default")
        job.cluster = profile.name if above.cluster in ("auto", profile.name) else str(profile.path)
        nodes = parse_nodes(job.nodes, where=sources["nodes"])
        gpus = parse_gpus(job.gpus, where=sources["gpus"])
        asked = cls(job, sources, profile, nodes, gpus, tuple(notes), missing)
        return asked._without_launcher(layers[0].line if layers else ())

    def _without_launcher(self, line: Sequence[str]) -> Asked:
        """With the commands that the ranks really run: hpcddp starts them, no other launcher."""
        job, notes = self.spec, list(self.notes)
        if not job.command:
            return self
        from hpcddp.planning import inner_launcher

        size = inner_launcher.AskedSize(self.nodes, self.gpus, self.sources, self.backend)
        job.command, note = inner_launcher.settle(job.command, "command", size, line)
        notes += [note] if note else []
        again = inner_launcher.settle(job.resume_command, "resume_command", size, line)
        job.resume_command = again[0]
        return self._replace(notes=tuple(notes))

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


def _resolve(cluster: str) -> str:
    """The cluster in place of `auto`: Slurm if sbatch works here, otherwise this machine."""
    if cluster != "auto":
        return cluster
    return "slurm" if sbatch.answers() else "local"


def _refuse_slurm_options(layers: Sequence[Layer]) -> None:
    """Refuse options for Slurm on the command line: without Slurm, the job would train here, on
    what may be a login node. Variables and job files may have them for other machines."""
    for layer in layers:
        for name, source in layer.sources.items():
            key = name.removeprefix("slurm.")
            if name != key and source.startswith("--"):
                subject = "" if source == f"--{key}" else f"{key} "
                raise UserError(
                    f"{subject}requires Slurm, which was not found",
                    where=source,
                    hint="add --cluster local to train on this machine, or submit where sbatch is",
                )
