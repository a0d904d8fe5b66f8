"""How the job of a plan fits its cluster: notes, and the memory to ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcddp import strategy
from hpcddp.errors import ClusterError
from hpcddp.planning.asked import Asked
from hpcddp.planning.gpu_request import GpuRequest
from hpcddp.planning.site import fitting, node_memory, site_facts
from hpcddp.planning.site.cluster_now import ClusterNow
from hpcddp.planning.site.site_facts import DAY, SiteFacts, stamp
from hpcddp.planning.site.wanted import Wanted
from hpcddp.planning.software import software_facts
from hpcddp.sizes import counted
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import SoftwareSpec


class JobFit(NamedTuple):
    """How a job fits.

    Args:
        notes: for the user.
        memory_mb: to ask for on each node; 0 to ask for none.
        facts: recorded with the profile; None if there are none, or Slurm was not asked.
    """

    notes: list[str]
    memory_mb: int = 0
    facts: SiteFacts | None = None

    def imported(self, software: SoftwareSpec) -> float:
        """Seconds that the import of torch took in a check-up; 0 if unknown."""
        return self.facts.imports.get(software_facts.place(software), 0.0) if self.facts else 0.0


def of(
    asked: Asked,
    now: ClusterNow,
    request: GpuRequest,
    kinds: Sequence[NodeKind],
    cpus: int,
    environ: Mapping[str, str],
) -> JobFit:
    """How a job fits its cluster.

    Args:
        kinds: the kinds of nodes that the job can land on.
        cpus: of a rank.
        environ: the user's.

    Raises:
        ClusterError: it cannot run.
    """
    if not now.site:  # Slurm was not asked, or did not answer
        return JobFit([])
    gpus, ranks = asked.gpus, strategy.processes(asked.spec.strategy, asked.gpus)
    wanted = Wanted(asked.spec, asked.sources, asked.allocated, gpus if request.option else 0,
                    request.type, cpus * ranks)  # fmt: skip
    facts, damaged = _recorded(asked)
    notes = [*damaged, *_old_config(now), *fitting.check(wanted, now, facts)]
    return JobFit(notes, node_memory.share(wanted, now, kinds, facts, environ), facts)


def _old_config(now: ClusterNow) -> list[str]:
    """A note if the configuration was read more than a day ago."""
    age = time.time() - now.config_read
    if not now.config_read or age <= DAY:
        return []
    days = counted(int(age / DAY), "day")
    return [
        f"Slurm's configuration was read {days} ago, at {stamp(now.config_read)}; "
        "`hpcddp cluster detect` reads it again"
    ]


def _recorded(asked: Asked) -> tuple[SiteFacts | None, list[str]]:
    """The facts recorded with the profile, and a note if they are damaged."""
    try:
        return site_facts.load(asked.profile.path), []
    except ClusterError as error:
        return None, [f"{error.where}: {error.what}; {error.hint}"]
