"""Whether the job of a plan fits its cluster."""

from __future__ import annotations

from hpcddp import strategy
from hpcddp.errors import ClusterError
from hpcddp.planning.asked import Asked
from hpcddp.planning.gpu_request import GpuRequest
from hpcddp.planning.site import fitting, site_facts
from hpcddp.planning.site.cluster_now import ClusterNow
from hpcddp.planning.site.wanted import Wanted


def notes(asked: Asked, now: ClusterNow, request: GpuRequest, cpus: int) -> list[str]:
    """Notes for the user on whether the job fits.

    Args:
        cpus: of a rank.

    Raises:
        ClusterError: it cannot run.
    """
    if not now.site:  # Slurm was not asked, or did not answer
        return []
    gpus, ranks = asked.gpus, strategy.processes(asked.spec.strategy, asked.gpus)
    wanted = Wanted(asked.spec, asked.sources, asked.nodes, gpus if request.option else 0,
                    request.type, cpus * ranks)  # fmt: skip
    try:
        facts = site_facts.load(asked.profile.path)
    except ClusterError as error:
        return [f"{error.where}: {error.what}; {error.hint}", *fitting.check(wanted, now, None)]
    return fitting.check(wanted, now, facts)
