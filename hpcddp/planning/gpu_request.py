"""How a job asks Slurm for GPUs, and the GPUs of each of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hpcddp.errors import TopologyError
from hpcddp.planning.clusters import Cluster
from hpcddp.planning.site import choices
from hpcddp.sizes import NodeRange, counted, parse_gpus
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import JobSpec

CPU = "cpu"  # the value of `device` that requests no GPUs, and hides them from the ranks
# An empty list hides all GPUs from CUDA, and from HIP and ROCm.
HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")

OWN = ("gres", "tres-per-node", "tres-per-task")  # by which a job can request GPUs itself


class GpuRequest(NamedTuple):
    """The sbatch option that requests the GPUs of a node.

    Args:
        option: its long name; "" if none is requested.
        note: for the user, if none is requested or the type is not the usual one.
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
    if job.device == CPU:
        return GpuRequest("", "")
    option, where = cluster.gpu_option, _partitions(kinds)
    if option == "none":
        return GpuRequest("", "", _unrequested(job, kinds))
    if kinds and not any(kind.gpus for kind in kinds):
        each = f"{counted(gpus, 'process', 'processes')} per node run on CPUs"
        by_feature = choices.names_gpu(str(job.slurm.get("constraint", "")))
        return GpuRequest("", "", "" if by_feature else f"partition {where} has no GPUs: {each}")
    kind, note = job.gpu_type or cluster.gpu_type, ""
    types = {row.type for node in kinds for row in node.gpus}
    if kind and not job.gpu_type and types and kind not in types:
        kind, note = "", f"partition {where} has no {kind}, the cluster's usual GPU: any type does"
    number = f"{kind}:{gpus}" if kind else str(gpus)
    if option == "gpus-per-node":
        return GpuRequest(option, number, note, kind)
    return GpuRequest(option, f"gpu:{number}", note, kind)


def asks(job: JobSpec, request: GpuRequest) -> bool:
    """Whether a job asks for GPUs: by hpcddp's option, by its own, or by a feature that names a
    GPU, where nodes have no other sign of it."""
    if job.device == CPU:
        return False
    by_feature = choices.names_gpu(str(job.slurm.get("constraint", "")))
    return bool(request.option) or by_feature or _by_own_option(job)


def _by_own_option(job: JobSpec) -> bool:
    return any("gpu" in str(job.slurm.get(option, "")) for option in OWN)


def _partitions(kinds: Iterable[NodeKind]) -> str:
    return ", ".join(dict.fromkeys(kind.partition for kind in kinds))


def _unrequested(job: JobSpec, kinds: Sequence[NodeKind]) -> str:
    """A note about GPUs that neither the profile nor the job itself requests; "" for none."""
    if _by_own_option(job):
        return ""
    reason = 'the profile has gpu_option = "none"'
    if where := _partitions(kind for kind in kinds if kind.gpus):
        hint = 'change it to "gpus-per-node" or "gres"'
        return f"partition {where} has GPUs, but the job requests none: {reason}; {hint}"
    if job.gpu_type.lower() not in str(job.slurm.get("constraint", "")).lower():
        hint = "use -C with the feature of its nodes"
        return f"GPU type {job.gpu_type} is not requested: {reason}; {hint}"
    return ""
