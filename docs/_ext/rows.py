"""Launchers and strategies, from their tables."""

from __future__ import annotations

from collections.abc import Iterator

from markdown import code, sentence, table

from hpcddp.launch.launchers import LAUNCHERS
from hpcddp.strategy import STRATEGIES

PLACES = {"slurm": "Slurm", "local": "this machine"}


def launchers() -> Iterator[str]:
    """How processes can start, and where."""
    first = {row.backends[0]: name for name, row in reversed(LAUNCHERS.items())}
    rows = []
    for name, row in LAUNCHERS.items():
        where = ", ".join(
            PLACES[backend] + (" (default)" if name == first.get(backend) else "")
            for backend in row.backends
        )
        rows.append((code(name), sentence(row.text), where))
    yield from table(("launcher", "how the processes start", "where"), rows)


def strategies() -> Iterator[str]:
    """How a model can be spread."""
    rows = ((code(name), sentence(row.what)) for name, row in STRATEGIES.items())
    yield from table(("strategy", "what each rank holds"), rows)
