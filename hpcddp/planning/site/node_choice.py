"""The nodes that a job can land on, and the share of one that a GPU brings."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import JobSpec


def kinds_for(
    job: JobSpec, kinds: Sequence[NodeKind], gpus: int, kind: str = "", *, routed: bool = False
) -> list[NodeKind]:
    """The kinds of nodes of the job's partitions that have the requested GPUs and features.

    Where none has, these are all kinds of its partitions.

    Args:
        gpus: on each node.
        kind: type of the GPUs; "" for any.
        routed: a plugin chooses the partition of a job that names none.
    """
    wanted = str(job.slurm.get("partition", "")).split(",")
    rows = [row for row in kinds if row.partition in wanted]
    if wanted == [""]:
        rows = [row for row in kinds if row.default or routed]
    constraint = str(job.slurm.get("constraint", ""))
    typed = [row for row in rows if not kind or count(row, kind)] or rows
    fit = [row for row in typed if count(row, kind) >= gpus] or typed
    return [row for row in fit if has_features(constraint, row.features)] or fit


def has_features(constraint: str, features: Collection[str]) -> bool:
    """Whether a node has the features of --constraint (sbatch(1)). Where this depends on the other
    nodes, as in `a*2&b*2` or `[a|b]`, any of the features counts."""
    if re.search(r"[^\w.+&|,-]", constraint):
        return not set(re.split(r"[^\w.+-]+", constraint)).isdisjoint(features)
    names = re.split("[&,|]", constraint)
    fits = names[0] in features
    for operator, name in zip(re.findall("[&,|]", constraint), names[1:], strict=True):
        fits = (fits or name in features) if operator == "|" else (fits and name in features)
    return fits  # from left to right


def count(node: NodeKind, kind: str = "") -> int:
    """GPUs of a node, of one type or of all; Slurm looks at the case of a type."""
    return sum(row.count for row in node.gpus if not kind or row.type == kind)


def cpus_per_gpu(kinds: Sequence[NodeKind], gpus: int) -> int:
    """CPUs of one GPU: an even share of the node with the smallest; 0 without a node."""
    return min((kind.cpus // max(kind.gpu_count, gpus) for kind in kinds), default=0)
