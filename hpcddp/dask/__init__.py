"""Training on the workers of a Dask cluster, and a Dask cluster in a job (the launcher `dask`).

``run(client, fn, ...)`` calls a function on every worker of any cluster at once, as the ranks of
one process group; ``start`` does not wait. ``DaskResultsHandler`` brings files from the ranks.
``dispatch``, ``results`` and ``hpcddp.data`` have the names of dask-pytorch-ddp.

Under `hpcddp submit --launcher dask` each rank runs the job's command, as under any other launcher,
so that a script for DDP need not know of Dask. Beside each rank there is a Dask worker of the same
number. A program that is the client of all workers, with ``client()`` in it, is started as
`python -m hpcddp.dask PROGRAM`: rank 0 runs it, and the other ranks leave the place to their
workers.

It imports ``launch``, ``attempt`` and ``slurm``; nothing here imports Dask or torch before it is
called. Others use nothing of it: users' programs and the scripts start it.
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
    """A client of the job's own cluster, when all of its workers are there. Outside of a job it is
    a plain ``distributed.Client``, with a cluster on this machine.

    Args:
        here: options of that cluster, such as ``n_workers=2``. A job's is as it was submitted.
    """
    import distributed

    if "HPCDDP_DASK" not in os.environ:
        return distributed.Client(**here)
    own = distributed.Client()
    own.wait_for_workers(Rank.from_env(os.environ).world_size)
    return own
