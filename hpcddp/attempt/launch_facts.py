"""Facts about the launcher of an attempt's ranks.

per_node: one process per node starts the ranks; hides: no rank listens at MASTER_PORT after the
rendezvous; environment: the module that gives a rank its place; here: it can start ranks again in
the same allocation; spares: also on a spare node, if one is lost. The launchers' table has them,
and job.json those that are not in KNOWN. Each rank of a program imports this before it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcddp.record import JobRecord

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


def outlives_nodes(job: JobRecord) -> bool:
    """Whether Slurm does not end the job when a node of it is lost: see the plan's property of that
    name."""
    policy = job.spec.get("requeue", {})
    able = policy.get("enabled", True) and policy.get("here") and not job.container
    able = able and of(job.launcher, job.launch).get("spares")
    return bool(able and job.nodes[0] < job.nodes[1] + int(job.spec.get("spares", 0)))


def to_say(launcher: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a launcher for job.json."""
    return {} if facts == KNOWN.get(launcher) else dict(facts)
