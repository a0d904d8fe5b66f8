"""What an attempt must know of the launcher that started its ranks.

per_node: one process on each node starts the ranks there; hides: no rank listens at MASTER_PORT
when the ranks have met; environment: the module that gives a rank its place. The launchers' table
has them, and job.json those that are not here. Each rank of a program imports this before it
begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# An older version cannot read a job.json that has them, and its own job.json has none.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "fork": {"per_node": True},
    "torchrun": {"per_node": True, "hides": True},
    "horovod": {"hides": True, "environment": "hpcddp.launch.horovod"},
}


def of(launcher: str, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts of a run's launcher, by its name and by what job.json says."""
    return said or KNOWN.get(launcher, {})


def to_say(launcher: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What job.json is to say of a launcher."""
    return {} if facts == KNOWN.get(launcher) else dict(facts)
