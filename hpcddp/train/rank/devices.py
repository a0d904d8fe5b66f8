"""Chooses each rank's device, and finds nodes that have lost a GPU.

A node without a working GPU driver looks like a node without GPUs: its ranks would train on the CPU
beside GPUs, or wait for a process group that never starts. So each rank reports the GPUs that it
sees and those that Slurm allocated, and the last rank to arrive compares all reports.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hpcddp.attempt.error_record import host
from hpcddp.errors import RankMapError
from hpcddp.sizes import counted
from hpcddp.topology import Rank

# Variables that list a process's GPUs, as indices or names; the shortest list counts.
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NVIDIA = "0x10de"  # the PCI vendor
FEWER = (
    "ask Slurm for as many GPUs as ranks: set gpu_option in the cluster profile, or write "
    "--gpus-per-node into a script of your own"
)
HINT = "run nvidia-smi there: a GPU or its driver may be lost; the next attempt avoids the node"


def seen() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def given(environ: Mapping[str, str]) -> int:
    """GPUs that Slurm allocated to this process; 0 if none or unknown."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    counts = [int(count) if count.isdecimal() else 0]
    for name in VISIBLE:
        if name in environ:
            words = [word.strip() for word in environ[name].split(",")]
            # A process sees at most one slice of a GPU, even of a longer list (CUDA's MIG).
            slices = any(word.startswith("MIG") for word in words)
            named = sum(word.isdecimal() or word.startswith("GPU-") for word in words)
            counts.append(1 if slices else named)
    return min(counts)


def broken() -> bool:
    """Whether this node has an NVIDIA GPU and its driver's library, although torch sees no GPU.

    torch's build proves nothing: machines without a GPU usually have the build for CUDA too, and
    the sandbox claims GPUs on them.
    """
    if torch.version.cuda is None:
        return False
    vendors = Path("/sys/bus/pci/devices").glob("*/vendor")
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        return any(path.read_text().strip() == NVIDIA for path in vendors)
    return False


def pick(rank: Rank, count: int, environ: Mapping[str, str], *, local: bool) -> torch.device:
    """This rank's device: its own GPU, or the CPU if there are none or, locally, too few.

    Args:
        count: GPUs that this process sees.
        local: all ranks are on this machine.

    Raises:
        RankMapError: there are fewer GPUs than ranks on this node.
    """
    if count == 0 or (local and count < rank.world_size):
        return torch.device("cpu")
    if local:  # virtual nodes share the machine: use the global rank
        return torch.device("cuda", rank.world_rank)
    if count == 1:
        return torch.device("cuda", 0)
    if rank.local_rank < count:
        return torch.device("cuda", rank.local_rank)
    if count < (promised := given(environ)):
        what = f"sees {count} of the {promised} GPUs allocated to it"
        raise _lost(rank.world_rank, host(), what)
    raise RankMapError(
        f"local rank {rank.local_rank} sees only {counted(count, 'GPU')}",
        where=f"rank {rank.world_rank} on {host()}",
        hint=FEWER,
        rank=rank.world_rank,
        host=host(),
    )


def report(
    rank: Rank, device: torch.device, count: int, environ: Mapping[str, str]
) -> dict[str, Any]:
    """A rank's report on its device.

    Args:
        count: GPUs that this process sees.

    Raises:
        RankMapError: its GPU does not respond.
    """
    uuid = ""
    if device.type == "cuda":
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
        except RuntimeError as error:
            what = f"gets no answer from {device} ({str(error).splitlines()[0]})"
            raise _lost(rank.world_rank, host(), what) from None
    promised = given(environ)
    dead = promised > 0 and count == 0 and broken()
    return {"device": str(device), "uuid": uuid, "sees": count, "given": promised, "broken": dead}


def check_lost(reports: Sequence[Mapping[str, Any]]) -> None:
    """Find a node that has lost a GPU, by the reports of all ranks.

    Raises:
        RankMapError: a rank sees fewer GPUs than allocated, or its device is of another type than
            the others'.
    """
    # Also fewer than another rank: a list of devices that is too long everywhere is no loss.
    most = max(report["sees"] for report in reports)
    short = [r for r in reports if r["broken"] or r["sees"] < min(r["given"], most)]
    if short:
        worst = min(short, key=lambda r: int(r["sees"] - r["given"]))
        what = f"sees {worst['sees']} of the {counted(worst['given'], 'GPU')} allocated to it"
        raise _lost(worst["rank"], worst["host"], what)
    types = Counter(_type(report) for report in reports)
    if len(types) > 1:  # at a tie, the CPU is the loss
        odd = min(types, key=lambda name: (types[name], name))
        first = next(report for report in reports if _type(report) == odd)
        others = " and ".join(
            f"{n} of {len(reports)} ranks use {name}" for name, n in types.items() if name != odd
        )
        what = f"uses {first['device']}, but {others}"
        raise _lost(first["rank"], first["host"], what)


def _type(report: Mapping[str, Any]) -> str:
    return str(report["device"]).partition(":")[0]


def _lost(rank: int, name: str, what: str) -> RankMapError:
    """The error of a node: error.json names the node, whichever rank writes it."""
    text = f"rank {rank} on {name} {what}"
    return RankMapError(text, hint=HINT, rank=rank, host=name, bad_host=True)


def check_shared(reports: Sequence[Mapping[str, Any]]) -> None:
    """Check that no two ranks share a GPU: memory would be short, and NCCL would hang or fail.

    Raises:
        RankMapError: two ranks share one.
    """
    seen: dict[str, int] = {}
    for report in reports:
        uuid = report["uuid"]
        if uuid and uuid in seen:
            raise RankMapError(
                f"ranks {seen[uuid]} and {report['rank']} share one GPU, {uuid}",
                where=f"rank {report['rank']} on {report['host']}",
                hint=FEWER,
            )
        seen[uuid] = report["rank"]
