"""Step 3: the launcher of a job, and what it can do for it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.launch import launchers
from hpcddp.launch.launchers import Launcher
from hpcddp.planning.asked import Asked
from hpcddp.sizes import NodeRange
from hpcddp.spec import JobSpec


def choose(asked: Asked, template: Path) -> Launcher:
    """The job's launcher, which works at this site and can start the command.

    Args:
        template: of the script. If it starts the ranks itself, it is taken for the plain launcher.
    """
    job, where = asked.spec, asked.sources.get("launcher", "")
    itself = re.search(r"{%-?\s*block launch\b", template.read_text(encoding="utf-8"))
    if not (name := job.launcher):
        best = launchers.best(job, asked.backend, asked.profile)
        name = launchers.own(asked.backend) if itself else best
    row = launchers.find(name, asked.backend, where)
    if missing := row.missing(job, asked.profile):
        missing, _, hint = missing.partition("\n")
        raise UserError(
            f"launcher {row.name} does not work here: {missing}",
            where="launcher",
            hint=hint or f"use --launcher {launchers.own(asked.backend)}",
        )
    if row.python and not job.software.own_python:
        _forked(asked, row)
    _check_spares(asked, row)
    return row


def _check_spares(asked: Asked, row: Launcher) -> None:
    """Spare nodes are of use: they are Slurm's, and the launcher can start ranks on them."""
    if not asked.spec.spares:
        return
    where = asked.sources.get("spares", "spares")
    if asked.backend != "slurm":
        raise UserError("spares requires Slurm: this machine is one node", where=where,
                        hint="remove it")  # fmt: skip
    if asked.spec.software.container.image:
        raise UserError("spares does not work with a container: from there, a node cannot ask "
                        "Slurm whether another one is lost", where=where,
                        hint="remove one of them")  # fmt: skip
    for key in ("enabled", "here"):
        if not getattr(asked.spec.requeue, key):
            raise UserError(f"spares has no effect if requeue.{key} is false", where=where,
                            hint="remove one of them")  # fmt: skip
    if not row.facts.get("spares"):
        able = [name for name, other in launchers.LAUNCHERS.items() if other.facts.get("spares")]
        raise UserError(f"launcher {row.name} cannot replace a lost node", where=where,
                        hint=f"use --launcher {' or '.join(able)}, or no spares")  # fmt: skip


def _forked(asked: Asked, row: Launcher) -> None:
    """A launcher that runs scripts in its own processes runs them in this Python."""
    from hpcddp.launch import script

    if asked.spec.spares:  # it can start any command
        return
    for words in filter(None, (asked.spec.command, asked.spec.resume_command)):
        if named := script.other_python(script.Script(words)):
            raise UserError(
                f"launcher {row.name} runs scripts in the Python of hpcddp ({sys.executable}), "
                f"but the command names {named}",
                where="launcher",
                hint=f"use --launcher {launchers.own(asked.backend)}, or install hpcddp in {named}",
            )


def outlives_nodes(job: JobSpec, row: Launcher, nodes: NodeRange) -> bool:
    """Whether the job may continue, in place, when a node is lost: on a spare, or on fewer. From a
    container, no other node can ask Slurm whether that of the script is lost."""
    able = job.requeue.enabled and job.requeue.here and not job.software.container.image
    able = able and row.facts.get("spares", False) and "slurm" in row.backends
    return able and nodes.min < nodes.max + job.spares
