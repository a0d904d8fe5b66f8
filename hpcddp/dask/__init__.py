"""Training on the workers of a Dask cluster, and a Dask cluster in a job (the launcher `dask`).

``run(client, fn, ...)`` calls a function on every worker of any Dask cluster at once, as the ranks
of one process group. ``start`` does the same without waiting. ``DaskResultsHandler`` writes files
from the ranks on the client. ``dispatch``, ``results`` and ``hpcddp.data`` have the names of
dask-pytorch-ddp.

Under ``hpcddp submit --launcher dask`` each rank runs the job's command, as under any other
launcher, so a DDP script need not use Dask. Each rank has a Dask worker of the same number beside
it. A program that is the client of all workers calls ``client()`` and is started as
``python -m hpcddp.dask PROGRAM``: rank 0 runs it, and the other ranks leave their CPUs and GPUs to
the workers.

It imports ``launch``, ``attempt`` and ``slurm``; Dask and torch are imported inside functions. No
other room uses it: users' programs and the job scripts start it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hpcddp.dask.ranks import Ranks, run, start
from hpcddp.dask.results import DaskResultsHandler
from hpcddp.topology import Rank

if TYPE_CHECKING:
    from distributed import Client

__all__ = ["DaskResultsHandler", "Ranks", "client", "run", "start"]


def client(**here: Any) -> Client:
    """Return a client of the job's Dask cluster, when all its workers have connected.

    Outside a job, return a ``distributed.Client`` of a new cluster on this machine.

    Args:
        here: Options of the cluster on this machine, such as ``n_workers=2``. They have no effect
            in a job, whose cluster has one worker per rank.

    Raises:
        ImportError: Dask is not installed (extra ``dask`` of hpcddp).
    """
    import distributed

    if "HPCDDP_DASK" not in os.environ:
        return distributed.Client(**here)
    own = distributed.Client()
    own.wait_for_workers(Rank.from_env(os.environ).world_size)
    return own
