"""Jobs on another cluster than that of this shell: Slurm's programs are led there by a variable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_CLUSTERS: ContextVar[str] = ContextVar("clusters", default="")


@contextlib.contextmanager
def asked(clusters: str) -> Iterator[None]:
    """Ask about jobs on some clusters, in a `with` statement.

    Args:
        clusters: their names, as in sbatch's option --clusters; "" for the cluster of this shell.
    """
    token = _CLUSTERS.set(clusters)
    try:
        yield
    finally:
        _CLUSTERS.reset(token)


def names() -> str:
    """The clusters that are asked about; "" for that of this shell."""
    return _CLUSTERS.get()


def variables() -> dict[str, str]:
    """The variable for the clusters that are asked about (squeue(1), SLURM_CLUSTERS)."""
    return {"SLURM_CLUSTERS": names()} if names() else {}
