"""How a job asks Slurm for GPUs, and the GPUs of each of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcddp.errors import TopologyError
from hpcddp.planning.clusters import Cluster
from hpcddp.sizes import NodeRange, counted, parse_gpus
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import JobSpec

CPU = "cpu"  # the value of `device` that requests no GPUs, and hides them from the ranks
# An empty list hides all GPUs from CUDA, and from HIP and ROCm.
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


class GpuRequest(NamedTuple):
    """The sbatch option that requests the GPUs of a node.

    Args:
        option: its long name; "" if none is requested.
        note: for the user, if the nodes have none.
    """

    option: str
    value: str
    note: str = ""
    type: str = ""  # of the GPUs; "" for any


def per_node(job: JobSpec, nodes: NodeRange, sources: Mapping[str, str]) -> int:
    """GPUs of each node: as asked, or an even share of the job's total.

    Raises:
        TopologyError: it is no number, or the nodes do not divide the total.
    """
    total = job.total_gpus
    if not total:
        return parse_gpus(job.gpus, where=sources.get("gpus", "default"))
    where = sources.get("total_gpus", "total_gpus")
    if nodes.min != nodes.max:
        what = f"{counted(total, 'GPU')} in all cannot be divided over {nodes} nodes"
        raise TopologyError(what, where=where, hint="use a fixed number of nodes, or --gpus")
    if total % nodes.max:
        low = total // nodes.max * nodes.max
        near = f"{low} or {low + nodes.max}" if low else str(nodes.max)
        what = f"{counted(total, 'GPU')} in all do not divide over {counted(nodes.max, 'node')}"
        raise TopologyError(what, where=where, hint=f"use {near} GPUs, or another number of nodes")
    return total // nodes.max


def of(job: JobSpec, cluster: Cluster, gpus: int, kinds: Sequence[NodeKind]) -> GpuRequest:
    """The request for the GPUs of a node.

    Args:
        kinds: the kinds of nodes that the job can land on; empty if unknown.
    """
    option = cluster.gpu_option
    if option == "none" or job.device == CPU:
        return GpuRequest("", "")
    if kinds and not any(kind.gpus for kind in kinds):
        where = ", ".join(dict.fromkeys(kind.partition for kind in kinds))
        each = f"{counted(gpus, 'process', 'processes')} per node run on CPUs"
        return GpuRequest("", "", f"partition {where} has no GPUs: {each}")
    kind, note = job.gpu_type or cluster.gpu_type, ""
    types = {row.type for node in kinds for row in node.gpus}
    if kind and not job.gpu_type and types and kind not in types:
        where = ", ".join(dict.fromkeys(node.partition for node in kinds))
        kind, note = "", f"partition {where} has no {kind}, the cluster's usual GPU: any type does"
    number = f"{kind}:{gpus}" if kind else str(gpus)
    if option == "gpus-per-node":
        return GpuRequest(option, number, note, kind)
    return GpuRequest(option, f"gpu:{number}", note, kind)
