"""Cluster profiles: the facts of a site, one TOML file each, with a child template if needed.

A cluster's name is a path, or a profile in the user's folder ($XDG_CONFIG_HOME/hpcddp/clusters), or
a shipped one (templates/clusters), in this order. `auto` is the user's profile that has the name of
the cluster at Slurm, or else `slurm`. HPCDDP_SITE_CONFIG is the path of the profile that a site has
for `slurm`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcddp.errors import ClusterError, JobFileError
from hpcddp.keys import Keys, key, nearest
from hpcddp.planning import resources
from hpcddp.planning.jobfile import Layer, read_toml
from hpcddp.planning.software import software_keys
from hpcddp.spec import ContainerSpec, SoftwareSpec

GPU_OPTIONS = ("gpus-per-node", "gres", "none")


@dataclass
class Cluster:
    """One site."""

    description: str = key("", "description of the site, for people")
    backend: str = key(
        "slurm", "where scripts run: Slurm, or this machine", choices=("slurm", "local")
    )
    template: str = key("", "script template; by default that of the backend")
    launcher: str = key("", "launcher, which starts the processes; by default that of the backend")
    nodes: int = key(0, "most nodes of a job; 0 for no limit", least=0)
    gpus_per_node: int = key(0, "most GPUs of a node; 0 for no limit", least=0)
    cpus_per_gpu: int = key(
        0, "CPUs per GPU; 0 for an even share of the partition's smallest node", least=0
    )
    max_time: str = key("", "longest time limit, as Slurm writes it; empty for no limit")
    gpu_option: str = key("gpus-per-node", "sbatch option that requests GPUs", choices=GPU_OPTIONS)
    gpu_type: str = key("", "GPU type to request, such as a100")
    gpu_memory: str = key("", "memory size of a GPU, such as 80G, for `hpcddp plan`")
    host_suffix: str = key("", "suffix of the first host's name in MASTER_ADDR, such as -ib0")
    interface: str = key("", "network interface for gloo and NCCL, such as ib0")
    modules: list[str] = key([], "the same as software.modules; only one of the two can be set")
    poll_seconds: int = key(
        30, "time between two queries to Slurm when following a job, in s", least=1
    )
    variables: dict[str, Any] = key(
        {}, "read-only shell variables for the site's template", scalar=True
    )
    slurm: dict[str, Any] = key({}, "sbatch options of each job, by their long names", scalar=True)
    env: dict[str, Any] = key({}, "environment variables of each job", scalar=True)
    software: SoftwareSpec = field(default_factory=SoftwareSpec)


TAKEN = ("", "auto", "local", "slurm")  # values of --cluster with a meaning of their own
KEYS = Keys(Cluster, {"software": SoftwareSpec, "software.container": ContainerSpec})


@dataclass
class Profile:
    """A loaded profile: its name, its file, its values."""

    name: str
    path: Path
    cluster: Cluster

    def layer(self) -> Layer:
        """The profile's values for a job: the layer below the job file."""
        where = str(self.path)
        layer = Layer()
        for table in ("slurm", "env"):
            for name, value in getattr(self.cluster, table).items():
                layer.put(f"{table}.{name}", value, where)
        for name in ("template", "launcher"):
            if getattr(self.cluster, name):
                layer.put(name, getattr(self.cluster, name), where)
        for name, value in self.software().items():
            layer.put(name, value, where)
        return layer

    def software(self) -> dict[str, Any]:
        """The values of [software] that the profile sets, with whole paths."""
        flat = KEYS.flatten({"software": asdict(self.cluster.software)})
        changed = {name: value for name, value in flat.items() if value != KEYS.rows[name].default}
        return software_keys.placed(changed, self.path.parent)


def folders(environ: Mapping[str, str]) -> list[Path]:
    """The folders of profiles and templates, in the order of the search."""
    home = environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return [Path(home, "hpcddp", "clusters"), resources.folder("templates") / "clusters"]


def known(environ: Mapping[str, str]) -> dict[str, Path]:
    """The profiles by name: the user's, and the shipped ones that they do not replace."""
    files: dict[str, Path] = {}
    for folder in reversed(folders(environ)):
        files |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return files


def profile_name(cluster: str) -> str:
    """The name of the user's profile for a cluster of that name at Slurm; some names are taken."""
    return f"{cluster or 'slurm'}-cluster" if cluster in TAKEN else cluster


def own(environ: Mapping[str, str]) -> dict[str, Path]:
    """The user's profiles by name."""
    return {path.stem: path for path in folders(environ)[0].glob("*.toml")}


def load(name: str, environ: Mapping[str, str] = os.environ) -> Profile:
    """The profile of a name or path.

    Raises:
        ClusterError: the name is unknown, or the file has a wrong key or value.
    """
    site = environ.get("HPCDDP_SITE_CONFIG")
    if name == "slurm" and site:
        return read(Path(site))
    if name.endswith(".toml") or "/" in name:
        return read(Path(name).absolute())
    profiles = known(environ)
    if name not in profiles:
        raise ClusterError(
            f"unknown cluster {name!r}",
            where=str(folders(environ)[0]),
            hint=nearest(name, ["auto", *profiles], what="cluster"),
        )
    return read(profiles[name])


def read(path: Path) -> Profile:
    """The profile in a file."""
    try:
        cluster = KEYS.load(read_toml(path), str(path))
    except JobFileError as error:
        raise ClusterError(error.what, where=error.where, hint=error.hint) from None
    if cluster.modules and cluster.software.modules:
        hint = "keep software.modules, and remove the other one"
        raise ClusterError("modules and software.modules are both set", where=str(path), hint=hint)
    cluster.software.modules += cluster.modules
    cluster.modules = []
    return Profile(path.stem, path, cluster)
