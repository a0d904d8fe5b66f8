"""The partitions of a Slurm, and the smallest node of each."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.slurm import commands as slurm


class Partition(NamedTuple):
    """A partition in sinfo, with the smallest of its kinds of nodes."""

    name: str
    default: bool
    cpus: int
    gpus: int


def read() -> list[Partition]:
    """The partitions, with one row per kind of node."""
    done = slurm.call("sinfo", "--noheader", "--format=%P|%c|%G")
    rows = []
    for line in done.stdout.splitlines():
        name, cpus, gres = line.split("|", 2)
        gpus = sum(int(n) for n in re.findall(r"gpu(?::[^:,(]+)?:(\d+)", gres))
        number = int(re.sub(r"\D", "", cpus) or 1)
        rows.append(Partition(name.rstrip("*"), name.endswith("*"), number, gpus))
    return rows
