"""File descriptors of a rank: enough of them for connections to all other ranks, or a clear error.

gloo connects each rank with each other one, once more for each group, and the first rank hosts the
store besides. The usual soft limit of 1,024 is too low for about 300 ranks; a rank that reaches it
fails with "Too many open files" on one host, while the others wait.
"""

from __future__ import annotations

import resource

from hpcddp.attempt.error_record import host
from hpcddp.errors import TopologyError
from hpcddp.topology import Rank

GROUP = 3  # of a gloo group beside one for each rank: its event loop's (torch 2.13, counted)
STORE = 10  # of the store beside one for each rank
MARGIN = 128  # files, data workers, and what NCCL opens
# Raised to no more than this where fewer are needed: some programs close all that there could be.
PLENTY = 1 << 16


def needed(rank: Rank, groups: int) -> int:
    """Descriptors that a rank needs.

    Args:
        groups: of gloo, over all ranks.
    """
    hosts = rank.world_size + STORE if rank.world_rank == 0 else 0
    return groups * (rank.world_size + GROUP) + hosts + MARGIN


def provide(rank: Rank, groups: int) -> None:
    """Raise the soft limit of this process as far as it is of use.

    Raises:
        TopologyError: the hard limit is too low for the world.
    """
    need = needed(Rank(0, *rank[1:]), groups)  # of the rank that needs most: all say the same
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < need:
        raise TopologyError(
            f"{rank.world_size} ranks need {need} file descriptors in this process, and the hard "
            f"limit is {hard}",
            where=f"rank {rank.world_rank} on {host()}",
            hint="raise it: LimitNOFILE of slurmd on the node, or `ulimit -n` in the shell that "
            "submits, which Slurm may hand on (PropagateResourceLimits)",
        )
    wanted = max(need, PLENTY) if hard == unlimited else min(max(need, PLENTY), hard)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
