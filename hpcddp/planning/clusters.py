"""Cluster profiles: facts of a site. One TOML file a site; a child template if it needs shell.

A profile is looked for, in this order: a path, the user's own folder
($XDG_CONFIG_HOME/hpcddp/clusters), the shipped ones (templates/clusters). HPCDDP_SITE_CONFIG names
the profile that `auto` and `slurm` stand for on a site.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp.errors import ClusterError, JobFileError
from hpcddp.keys import Keys, key, nearest
from hpcddp.planning import resources
from hpcddp.planning.jobfile import Layer, read_toml

GPU_OPTIONS = ("gpus-per-node", "gres", "none")


@dataclass
class Cluster:
    """One site."""

    description: str = key("", "what a person should know of it")
    backend: str = key("slurm", "who takes the script", choices=("slurm", "local"))
    template: str = key("", "script template; the backend's by default")
    launcher: str = key("", "how processes start; the backend's by default")
    nodes: int = key(0, "most nodes of one job; 0 for no limit", least=0)
    gpus_per_node: int = key(0, "GPUs of one node; 0 for no limit", least=0)
    cpus_per_gpu: int = key(0, "CPUs for each GPU; 0 for what the partition has", least=0)
    max_time: str = key("", "longest time limit, in Slurm's forms")
    gpu_option: str = key("gpus-per-node", "how GPUs are asked for", choices=GPU_OPTIONS)
    gpu_type: str = key("", "type of GPU to ask for, such as a100")
    gpu_memory: str = key("", "memory of one GPU, such as 80G; hpcddp plan goes by it")
    host_suffix: str = key("", "added to the first host's name for MASTER_ADDR, such as -ib0")
    interface: str = key("", "network interface of gloo and NCCL, such as ib0")
    modules: list[str] = key([], "environment modules that a job loads")
    poll_seconds: int = key(30, "seconds between two questions to Slurm when following", least=1)
    variables: dict[str, Any] = key(
        {}, "read-only shell variables for the site's template", scalar=True
    )
    slurm: dict[str, Any] = key({}, "sbatch options of every job, by their long names", scalar=True)
    env: dict[str, Any] = key({}, "environment variables of every job", scalar=True)


KEYS = Keys(Cluster)


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
        return layer


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Where profiles and templates of a name are looked for, first match first."""
    home = environ.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return [Path(home, "hpcddp", "clusters"), resources.folder("templates") / "clusters"]


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
    known: dict[str, Path] = {}
    for folder in reversed(folders(environ)):
        known |= {p.stem: p for p in folder.glob("*.toml")}
    if name not in known:
        raise ClusterError(
            f"unknown cluster {name!r}",
            where=str(folders(environ)[0]),
            hint=nearest(name, ["auto", *known], what="cluster"),
        )
    return read(known[name])


def read(path: Path) -> Profile:
    """The profile in a file."""
    try:
        return Profile(path.stem, path, KEYS.load(read_toml(path), str(path)))
    except JobFileError as error:
        raise ClusterError(error.what, where=error.where, hint=error.hint) from None
