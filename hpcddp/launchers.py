"""Launchers: how processes start inside an allocation. A row and a template fragment each."""

from __future__ import annotations

from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.keys import nearest


class Launcher(NamedTuple):
    """One way to start a job's processes: templates/launch/NAME.sh.j2."""

    name: str
    backend: str  # which scripts it can stand in
    text: str

    @property
    def fragment(self) -> str:
        return f"launch/{self.name}.sh.j2"


LAUNCHERS = {
    row.name: row
    for row in (
        Launcher("srun", "slurm", "one task per GPU, started by Slurm"),
        Launcher("spawn", "local", "one process per GPU on this machine, without a scheduler"),
    )
}


def find(name: str, backend: str, where: str = "--set launcher") -> Launcher:
    """The launcher of a name, or the backend's own if the name is empty."""
    mine = {n: row for n, row in LAUNCHERS.items() if row.backend == backend}
    if not name:
        return next(iter(mine.values()))
    if name not in mine:
        what = f"launcher {name!r} does not work with backend {backend}"
        what = what if name in LAUNCHERS else f"unknown launcher {name!r}"
        raise UserError(what, where=where, hint=nearest(name, mine, what="launcher"))
    return mine[name]
