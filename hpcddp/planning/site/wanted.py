"""What a job asks of a cluster, and in what it does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hpcddp.sizes import NodeRange, bytes_of
from hpcddp.slurm import time_limit
from hpcddp.spec import JobSpec

MB = 1024**2


@dataclass(frozen=True)
class Wanted:
    """What a job asks for.

    Args:
        gpus: per node; 0 if it requests none.
        gpu_type: "" for any.
        cpus: per node.
    """

    job: JobSpec
    sources: Mapping[str, str]
    nodes: NodeRange
    gpus: int
    gpu_type: str
    cpus: int

    def option(self, name: str) -> str:
        """The value of an sbatch option; "" without one, and for false, which leaves it out."""
        value = self.job.slurm.get(name, "")
        return "" if value is False else str(value)

    def source(self, name: str) -> str:
        """Where a value was set."""
        return self.sources.get(name) or self.sources.get(f"slurm.{name}") or name

    @property
    def partitions(self) -> list[str]:
        """The names of its partitions; empty if it names none."""
        return [name for name in self.option("partition").split(",") if name]

    @property
    def seconds(self) -> float:
        """The time limit; infinity for none."""
        return time_limit.seconds(self.option("time") or "0", self.source("time"))

    @property
    def memory_mb(self) -> int:
        """Memory of each node in MB; 0 for none. As in sbatch, a number alone is MB."""
        name, share = self.memory_option
        text = self.option(name)
        if not text or text == "0":
            return 0
        text = f"{text}M" if text.isdecimal() else text
        return share * math.ceil(bytes_of(text, self.source(name), what="memory") / MB)

    @property
    def memory_option(self) -> tuple[str, int]:
        """The option that asks for memory, and how often a node gets it."""
        shares = {"mem-per-cpu": self.cpus, "mem-per-gpu": self.gpus}
        return next(((n, share) for n, share in shares.items() if self.option(n)), ("mem", 1))

    @property
    def memory(self) -> str:
        """The memory of each node, as a person asked for it."""
        name, share = self.memory_option
        return self.option(name) if share == 1 else f"{share} x {self.option(name)}"

    def tres(self) -> dict[str, int]:
        """The least that the whole job asks for, by the names of Slurm; memory in MB."""
        nodes, gpus = self.nodes.min, self.nodes.min * self.gpus
        typed = {f"gres/gpu:{self.gpu_type}": gpus} if self.gpu_type else {}
        rows = {"node": nodes, "gres/gpu": gpus, **typed, "cpu": nodes * self.cpus,
                "mem": nodes * self.memory_mb}  # fmt: skip
        return {name: count for name, count in rows.items() if count}


@dataclass(frozen=True)
class Problem:
    """Something in which a job does not fit.

    Args:
        what: of one line.
        key: the value that is too much.
        hint: what would fit.
        sure: False for what only makes the job wait, and for what Slurm may see otherwise.
    """

    what: str
    key: str
    hint: str
    sure: bool = True
