"""Between steps 2 and 3: the merged values of a job and its cluster.

Each value is valid by itself. checks.py checks whether they fit together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpcddp.data import names
from hpcddp.errors import SlurmUnreachable, UserError
from hpcddp.planning import clusters, gpu_request, jobfile
from hpcddp.planning.clusters import Profile
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.script.header import Origin
from hpcddp.planning.site import cluster_now
from hpcddp.planning.site.cluster_now import ClusterNow, Heard
from hpcddp.planning.software import software_keys
from hpcddp.sizes import NodeRange, parse_nodes
from hpcddp.slurm import sbatch
from hpcddp.spec import JobSpec


class Asked(NamedTuple):
    """A job's values, the source of each set value, and the size of the job.

    Args:
        gpus: per node.
        notes: for the user.
        slurm_missing: the cluster is this machine because Slurm was not found.
        heard: what Slurm said when the profile was looked for.
        origin: the command line and the job file.
    """

    spec: JobSpec
    sources: dict[str, str]
    profile: Profile
    nodes: NodeRange
    gpus: int
    notes: tuple[str, ...] = ()
    slurm_missing: bool = False
    heard: Heard | None = None
    origin: Origin = Origin()

    @classmethod
    def read(cls, layers: list[Layer], notes: list[str], environ: Mapping[str, str]) -> Asked:
        """Merge layers of values, the highest precedence first; the cluster's come last.

        Raises:
            UserError: the cluster or the size is invalid, an option requires Slurm, which was not
                found, or the command begins with a launcher of its own.
        """
        above, _ = jobfile.merge(layers)
        name, heard = resolve(above.cluster, environ)
        missing = above.cluster == "auto" and name == "local"
        if missing:
            _refuse_slurm_options(layers)
        profile = clusters.load(name, environ)
        job, sources = jobfile.merge([*layers, profile.layer()])
        sources.setdefault("nodes", "default")
        sources.setdefault("gpus", "default")
        job.cluster = profile.name if above.cluster in ("auto", profile.name) else str(profile.path)
        if profile.cluster.backend != "slurm" and not sources.get("spares", "--").startswith("--"):
            job.spares = 0
            notes = [*notes, "spares is left out: this machine is one node"]
        nodes = parse_nodes(job.nodes, where=sources["nodes"])
        if job.total_gpus:
            sources["gpus"] = sources["total_gpus"]
        job.gpus, job.total_gpus = gpu_request.per_node(job, nodes, sources), 0
        gpus = job.gpus
        line = layers[0].line if layers else ()
        origin = Origin(line, next((layer.file for layer in layers if layer.file), ""))
        asked = cls(job, sources, profile, nodes, gpus, tuple(notes), missing, heard, origin)
        return asked._without_launcher(line)

    def _without_launcher(self, line: Sequence[str]) -> Asked:
        """With the commands that the ranks really run: hpcddp starts them, no other launcher."""
        job, notes = self.spec, list(self.notes)
        if not job.command:
            return self
        from hpcddp.planning import inner_launcher

        size = inner_launcher.AskedSize(self.nodes, self.gpus, self.sources, self.backend)
        job.command, note = inner_launcher.settle(job.command, "command", size, line)
        notes += [note] if note else []
        job.resume_command, again = inner_launcher.settle(
            job.resume_command, "resume_command", size, line
        )
        notes += [again] if again and again != note else []
        return self._replace(notes=tuple(notes))

    @property
    def allocated(self) -> NodeRange:
        """The nodes that the job asks for, with its spares."""
        return NodeRange(*(count + self.spec.spares for count in self.nodes))

    @property
    def backend(self) -> str:
        return self.profile.cluster.backend

    def completed(self, folder: Path) -> JobSpec:
        """The job with full paths, and without requeue if an sbatch option turns it off."""
        job = self.spec
        stays = job.slurm.get("no-requeue") or job.slurm.get("requeue") is False
        return replace(
            job,
            start_from=str(folder / job.start_from) if job.start_from else "",
            data=replace(job.data, stage=names.placed(job.data.stage, folder)),
            software=software_keys.complete(job.software, folder),
            requeue=replace(
                job.requeue,
                enabled=job.requeue.enabled and not stays,
                here=job.requeue.here and not stays,
            ),
        )

    def now(self) -> ClusterNow:
        """What Slurm says of the cluster; nothing for a job on this machine."""
        if self.backend != "slurm":
            return ClusterNow()
        return cluster_now.read(self.spec, self.heard, self.profile.path)


def resolve(cluster: str, environ: Mapping[str, str]) -> tuple[str, Heard | None]:
    """The profile's name in place of `auto`, and what Slurm said if it was asked for it.

    It is this machine if sbatch does not work here; otherwise the user's profile that has the name
    of the cluster, if there is one.
    """
    if cluster != "auto":
        return cluster, None
    if not sbatch.answers():
        return "local", None
    own = clusters.own(environ)
    if not own:
        return "slurm", None
    try:
        profile, heard = cluster_now.ask(own.values())
    except SlurmUnreachable:
        if len(own) > 1:  # one of them must not be taken for another
            raise
        return next(iter(own)), None
    if profile:
        return profile.stem, heard
    name = clusters.profile_name(heard.config.get("ClusterName", ""))
    return name if name in own else "slurm", heard


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
