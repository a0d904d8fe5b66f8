"""The former name of ``placement``, for programs that import it."""

from hpcddp.dask.placement import WorkerInfo as Place
from hpcddp.dask.placement import devices, has_gpus, look, ranks

__all__ = ["Place", "devices", "has_gpus", "look", "ranks"]
