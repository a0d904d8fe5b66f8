"""The checks of [software]: what contradicts, and what cannot work at this site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.launch.launchers import LAUNCHERS, Launcher
from hpcddp.planning.software import software_facts
from hpcddp.planning.software.containers import CONTAINERS
from hpcddp.planning.software.software_keys import IMAGE, is_path
from hpcddp.spec import ContainerSpec, JobSpec


def check(job: JobSpec, launcher: Launcher, backend: str, sources: Mapping[str, str]) -> None:
    """Refuse a container that cannot start the job's ranks.

    Raises:
        UserError: the first error.
    """
    container = job.software.container
    if not container.image:
        return
    if backend not in CONTAINERS[container.runtime].backends:
        what = f"runtime {container.runtime} does not work with backend {backend}"
        good = ", ".join(name for name, row in CONTAINERS.items() if backend in row.backends)
        raise UserError(what, where="software.container.runtime", hint=f"use one of {good}")
    if not launcher.inside:
        good = ", ".join(
            n for n, row in LAUNCHERS.items() if row.inside and backend in row.backends
        )
        raise UserError(
            f"launcher {launcher.name} does not work in a container",
            where=sources.get("launcher", "launcher"),
            hint=f"use one of {good}",
        )
    _check_gpus(container, sources)
    for bind in container.binds:
        _, *rest = bind.split(":")
        if "," in bind or len(rest) > 2 or rest[1:] not in ([], ["ro"]):
            hint = "write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, without a comma"
            where = sources.get("software.container.binds", "software.container.binds")
            raise UserError(f"invalid bind {bind!r}", where=where, hint=hint)


def _check_gpus(container: ContainerSpec, sources: Mapping[str, str]) -> None:
    """Refuse a kind of GPUs for which the runtime has no option, though it needs one."""
    kind, kinds = container.gpus, CONTAINERS[container.runtime].gpus
    if kind == "none" or not kinds or kind in kinds:
        return
    good = ", ".join(name for name, row in CONTAINERS.items() if not row.gpus or kind in row.gpus)
    raise UserError(
        f"runtime {container.runtime} has no option for {kind} GPUs",
        where=sources.get("software.container.gpus", "software.container.gpus"),
        hint=f'use one of {good}, or software.container.gpus = "none" for a job without GPUs',
    )


def notes(job: JobSpec) -> Iterator[str]:
    """What does not exist on this machine, but must exist on the nodes."""
    software = job.software
    if (folder := software_facts.environment(software)) and not Path(folder, "bin/python").exists():
        key = "uv" if software.uv else "venv"
        made = f"; `uv sync --project {software.uv}` makes it" if software.uv else ""
        yield f"software.{key}: {folder} has no bin/python on this machine{made}"
    image = software.container.image
    if image and is_path(IMAGE, image) and not Path(image).exists():
        yield f"{IMAGE}: {image} does not exist on this machine, but must exist on the nodes"
