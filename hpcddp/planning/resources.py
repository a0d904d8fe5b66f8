"""The folders of the shipped templates and jobs, and the template of a job.

They are top-level folders that belong to the package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from hpcddp.errors import TemplateError
from hpcddp.keys import nearest

if TYPE_CHECKING:
    from hpcddp.planning.clusters import Profile
    from hpcddp.spec import JobSpec


def folder(name: str) -> Path:
    """The folder `templates` or `jobs`; the same from a checkout and from an installed package."""
    return Path(import_module(f"hpcddp.{name}").__path__[0])


def template(job: JobSpec, profile: Profile, sources: Mapping[str, str], here: Path) -> Path:
    """The template's file: beside its profile, from the current folder, or shipped.

    Args:
        here: the current folder.

    Raises:
        TemplateError: there is no such file.
    """
    shipped = folder("templates")
    name = job.template or f"{profile.cluster.backend}.sh.j2"
    source = sources.get("template", "")
    bases = [profile.path.parent] if source == str(profile.path) else [here] if source else []
    known = [f"{backend}.sh.j2" for backend in ("slurm", "local")]
    for base in (*bases, *([shipped] if name in known else [])):
        with contextlib.suppress(OSError):  # a name too long for a file
            if (base / name).is_file():
                return base / name
    raise TemplateError(f"unknown template {name!r}", where=source or "template",
                        hint=nearest(name, known, what="template"))  # fmt: skip
