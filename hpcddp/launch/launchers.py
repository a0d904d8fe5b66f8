"""Launchers: how processes start inside an allocation. A row and a template fragment each."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcddp.errors import SlurmUnreachable, UserError, install_extra
from hpcddp.keys import nearest
from hpcddp.launch import horovod
from hpcddp.slurm import commands as slurm
from hpcddp.spec import JobSpec

if TYPE_CHECKING:
    from hpcddp.planning.clusters import Profile


def nothing(job: JobSpec, profile: Profile) -> str:
    """What a launcher lacks here, and the remedy on a second line; "" if nothing is missing."""
    return ""


class Launcher(NamedTuple):
    """One way to start a job's processes: templates/launch/NAME.sh.j2."""

    name: str
    backends: tuple[str, ...]  # whose scripts can use it; the first row of each is its default
    text: str
    python: bool = False  # it runs Python scripts only
    missing: Callable[[JobSpec, Profile], str] = nothing  # see there
    ending: str = ""  # the template for the time after its processes have ended
    facts: Mapping[str, Any] = {}  # for an attempt; see launch_facts.py
    inside: bool = False  # its ranks may be in a container that has Python and torch alone
    tasks: bool = False  # the default of jobs with a task, where nothing is missing

    @property
    def fragment(self) -> str:
        return f"launch/{self.name}.sh.j2"


def no_mpi(job: JobSpec, profile: Profile) -> str:
    """What is missing to start ranks with MPI."""
    if shutil.which("mpirun"):
        return ""
    try:
        done = slurm.call("srun", "--mpi=pmix", "--test-only", "--ntasks=1", "true")
    except SlurmUnreachable:  # a script may be rendered elsewhere
        return ""
    errors = [x for x in done.stderr.lower().splitlines() if "error:" in x and "mpi" in x]
    if not errors:
        return ""
    return "`srun --mpi=pmix` loads no PMIx plugin, and mpirun is not installed"


def no_torch(job: JobSpec, profile: Profile) -> str:
    """Whether the Python of hpcddp has torch, for a launcher that imports it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    if job.software.own_python or PathFinder.find_spec("torch") or find_spec("torch"):
        return ""
    return f"torch is not installed in {sys.executable}"


def no_agent(job: JobSpec, profile: Profile) -> str:
    """Whether torch's agent can leave stop signals to us."""
    from importlib.metadata import version

    if lack := no_torch(job, profile):
        return lack
    if job.software.own_python:
        return ""
    installed = version("torch")
    old = tuple(int(part) for part in installed.split(".")[:2]) < (2, 9)
    return f"torch {installed} is older than 2.9" if old else ""


def no_dask(job: JobSpec, profile: Profile) -> str:
    """The packages that are missing for a Dask cluster with TLS."""
    from importlib.util import find_spec

    needed = () if job.software.own_python else ("distributed", "cryptography")
    missing = [name for name in needed if not find_spec(name)]
    names = f"{' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not installed"
    return f"{names}\n{install_extra('dask')}" if missing else ""


BOTH = ("slurm", "local")
LAUNCHERS = {
    row.name: row
    for row in (
        Launcher("srun", ("slurm",), "one task per GPU, started by Slurm",
                 facts={"here": True}, inside=True),
        Launcher("spawn", ("local",), "one process per GPU on this machine, without Slurm",
                 inside=True),
        Launcher(
            "fork", BOTH, "torch is imported once per node, and the ranks are forked",
            python=True, missing=no_torch, inside=True,
            facts={"per_node": True, "here": True, "spares": True}, tasks=True,
        ),
        Launcher(
            "mpi", ("slurm",), "one rank per GPU, started with PMIx or Open MPI's mpirun",
            missing=no_mpi, ending="launch/mpi_end.sh.j2",
        ),
        Launcher(
            "torchrun", BOTH, "torch's elastic agent, one per node",
            missing=no_agent, facts={"per_node": True, "hides": True, "here": True},
            inside=True,
        ),
        Launcher(
            "horovod", BOTH, "one rank per GPU, for scripts that use Horovod",
            missing=horovod.missing, facts={"hides": True, "environment": horovod.__name__},
        ),
        Launcher("dask", BOTH, "one Dask worker per GPU, which starts its rank", missing=no_dask),
    )
}  # fmt: skip


def own(backend: str) -> str:
    """The name of a backend's default launcher, which serves every job."""
    return next(name for name, row in LAUNCHERS.items() if backend in row.backends)


def best(job: JobSpec, backend: str, profile: Profile) -> str:
    """The name of the launcher for a job that names none. A script may set variables before it
    imports torch, so only a task gets a launcher that imports torch first, or a script with spares,
    which needs one."""
    mine = (row for row in LAUNCHERS.values() if row.tasks and backend in row.backends)
    for row in mine if job.spares or not job.command else ():
        if not row.missing(job, profile):
            return row.name
    return own(backend)


def find(name: str, backend: str, where: str = "--set launcher") -> Launcher:
    """The launcher with a name."""
    mine = {n: row for n, row in LAUNCHERS.items() if backend in row.backends}
    if name not in mine:
        what = f"launcher {name!r} does not work with backend {backend}"
        what = what if name in LAUNCHERS else f"unknown launcher {name!r}"
        raise UserError(what, where=where, hint=nearest(name, mine, what="launcher"))
    return mine[name]
