"""Facts about the launcher of an attempt's ranks.

per_node: one process per node starts the ranks; hides: no rank listens at MASTER_PORT after the
rendezvous; environment: the module that gives a rank its place; here: it can start ranks again in
the same allocation; spares: also on a spare node, if one is lost. The launchers' table has them,
and job.json those that are not in KNOWN. Each rank of a program imports this before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Older versions know these names, and cannot read a job.json with facts.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "srun": {"here": True},
    "fork": {"per_node": True, "here": True, "spares": True},
    "torchrun": {"per_node": True, "hides": True, "here": True},
    "horovod": {"hides": True, "environment": "hpcddp.launch.horovod"},
}


def of(launcher: str, said: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts of a run's launcher, by its name and job.json."""
    return said or KNOWN.get(launcher, {})


def to_say(launcher: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a launcher for job.json."""
    return {} if facts == KNOWN.get(launcher) else dict(facts)
