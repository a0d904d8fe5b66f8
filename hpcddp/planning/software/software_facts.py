"""[software] of a job -> facts and shell variables of its script.

The script prepares the software in the order of the keys, then the ranks' Python. If that is not
the Python of hpcddp, the ranks import the package from an archive in the run folder
(submit/package_archive.py), before the environment's own packages and without hiding any of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.planning.software import container_binds, containers
from hpcddp.planning.software.containers import CONTAINERS
from hpcddp.planning.software.software_keys import IMAGE, is_path
from hpcddp.spec import JobSpec, SoftwareSpec


class SoftwareFacts(NamedTuple):
    """What a script prepares: a step for each that is true.

    Args:
        python: the ranks use another Python than that of hpcddp.
        container: the ranks run in a container.
        srun: srun starts the container.
        image: the image is a file or a folder.
        points: a bound folder must exist in the image.
        python_path: [env] of the job sets PYTHONPATH.
        host_path: the host's PATH would choose the Python in the image.
        binds_tmp: the node's folder for temporary files is bound too.
    """

    purge: bool = False
    modules: bool = False
    setup: bool = False
    conda: bool = False
    venv: bool = False
    uv: bool = False
    python: bool = False
    container: bool = False
    srun: bool = False
    image: bool = False
    points: bool = False
    python_path: bool = False
    host_path: bool = False
    binds_tmp: bool = False


def facts(job: JobSpec) -> SoftwareFacts:
    """The facts about a job."""
    software, image = job.software, job.software.container.image
    row = CONTAINERS[software.container.runtime]
    return SoftwareFacts(
        purge=software.purge,
        modules=bool(software.modules),
        setup=bool(software.setup),
        conda=bool(software.conda),
        venv=bool(software.venv),
        uv=bool(software.uv),
        python=software.own_python,
        container=bool(image),
        srun=bool(image) and row.by_srun,
        image=is_path(IMAGE, image),
        points=bool(image) and row.points,
        python_path="PYTHONPATH" in job.env,
        host_path=bool(image) and row.host_path and "/" not in software.container.python,
        binds_tmp=bool(image) and row.binds_tmp,
    )


def variables(job: JobSpec, runs: Path, folder: Path, work: Path, *, gpus: bool) -> dict[str, Any]:
    """The shell variables of the steps.

    Args:
        runs: the folder of the runs.
        folder: the folder of the submission.
        work: where the job works.
        gpus: the job asks for GPUs.
    """
    software = job.software
    rows: dict[str, Any] = {
        "MODULES": software.modules,
        "SETUP": software.setup,
        "CONDA": software.conda,
        "VENV": environment(software),
        **(_container(job, runs, folder, work, gpus=gpus) if software.container.image else {}),
    }
    return {name: value for name, value in rows.items() if value}


def _container(job: JobSpec, runs: Path, folder: Path, work: Path, *, gpus: bool) -> dict[str, Any]:
    """The variables of a container; ``variables`` explains the arguments."""
    container = job.software.container
    row = CONTAINERS[container.runtime]
    binds = container_binds.of(job, runs, folder, row.shared)
    if row.points:  # /tmp is the node's in any case, and takes no other folder
        binds = [bind for bind in binds if not bind.partition(":")[2].startswith("/tmp/")]
    shown = binds, str(work)
    return {
        "IMAGE": container.image,
        "RUNTIME": "".join(row.start[:1]),
        "BINDS": binds if row.points else [],
        "CONTAINER": containers.command(container, *shown, gpus=gpus),
        "SRUN_OPTIONS": containers.options(container, *shown, gpus=gpus) if row.by_srun else [],
    }


def entrance(job: JobSpec, variables: Mapping[str, Any]) -> dict[str, Any]:
    """How a later command enters the container of a job, for its record: by the words of
    `command`, or not at all.

    Args:
        variables: those of ``variables``.
    """
    container = job.software.container
    if not container.image:
        return {}
    enters = CONTAINERS[container.runtime].enters
    words = {"command": variables["CONTAINER"]} if enters else {}
    return {"runtime": container.runtime, **words}


def environment(software: SoftwareSpec) -> str:
    """The folder of the virtual environment; "" for none."""
    return f"{software.uv}/.venv" if software.uv else software.venv


def place(software: SoftwareSpec) -> str:
    """The image, the environment or the prefix that holds the ranks' Python."""
    return software.container.image or environment(software) or software.conda or sys.prefix


def python(software: SoftwareSpec) -> str:
    """The ranks' Python; that of a conda environment is first on PATH once it is active."""
    if software.container.image:
        return software.container.python
    if folder := environment(software):
        return f"{folder}/bin/python"
    return "python" if software.conda else sys.executable
