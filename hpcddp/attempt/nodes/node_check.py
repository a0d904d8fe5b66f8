"""The light check of a node, on the node itself: what would end or spoil a job there.

It only finds what is certain, in a second at most besides the GPU driver's answer. A check-up that
also measures is `hpcddp doctor`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp.attempt import error_record
from hpcddp.attempt.nodes import machine
from hpcddp.rundir import RunDir, token

DISKS = ("/tmp", "/dev/shm")
FULL = 16 * 2**20  # bytes: with fewer a disk is full
VISIBLE = 5.0  # seconds until the attempt's folder must be visible
UNKNOWN = -1  # GPUs of a node whose driver does not answer in time
# Variables of a step that list the job's GPUs on the node, by indices or UUIDs. The first counts
# the GPUs that the step sees, as nvidia-smi does; the second counts all GPUs of the node.
GPUS = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for nodes on one machine


def answer(run: RunDir, number: int, first: str, boot: str, wanted: int | None = None) -> str:
    """The facts and faults of this node, as a line of JSON.

    Args:
        number: of the attempt.
        first: the address at which the first node's rank listens.
        boot: the first node's boot id.
        wanted: GPUs of a node that the job asked for; 0 for none, None if unknown.
    """
    count, faults = _gpus(os.environ) if wanted != 0 else (None, [])
    faults += [*_disks(), *_shared(run, number), *_network(first, boot, os.environ)]
    facts = {"host": error_record.host(), "time": time.time(), "gpus": count}
    return json.dumps({**facts, "faults": faults})


def boot_id() -> str:
    """The id of this machine's boot; "" if unknown."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def _gpus(environ: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """The number of GPUs here, and the faults of the job's GPUs; of all GPUs if Slurm does not say
    which the job has."""
    rows, trouble = machine.gpu_query()
    if trouble == machine.SILENT:
        return UNKNOWN, []
    named = {str(number): gpu for number, gpu in enumerate(rows or [])}
    if trouble and (own := _answering(environ)):
        rows, trouble = own, ""
        named = {str(gpu["uuid"]): gpu for gpu in own}
    faults = [f"nvidia-smi fails: {trouble}"] if trouble else []
    for name, gpu in _of_job(named, environ).items():
        if errors := machine.memory_errors(gpu):
            faults.append(f"GPU {name} has uncorrected memory errors ({errors})")
    return machine.gpu_count(rows), faults


def _answering(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """The job's GPUs, if all of them answer: nvidia-smi fails if another job's GPU is lost."""
    for ids in _lists(environ):
        rows, _ = machine.gpu_query(ids)
        if rows and len(rows) == len(ids):
            return rows
    return []


def _of_job(
    gpus: Mapping[str, dict[str, Any]], environ: Mapping[str, str]
) -> Mapping[str, dict[str, Any]]:
    """Those of some GPUs that the job has; all of them if that is unknown.

    Args:
        gpus: by their name, an index or a UUID.
    """
    for ids in _lists(environ):
        own = {name: gpu for name, gpu in gpus.items()
               if name in ids or str(gpu["uuid"]).startswith(tuple(ids))}  # fmt: skip
        if len(own) == len(ids):  # else they count other GPUs
            return own
    return gpus


def _lists(environ: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """The lists of the job's GPUs in the environment; none of slices of GPUs."""
    for name in GPUS:
        ids = [word.strip() for word in environ.get(name, "").split(",")]
        if all(word.isdecimal() or word.startswith("GPU-") for word in ids):
            yield ids


def _disks() -> Iterator[str]:
    """Disks of the node that are full or read-only."""
    for name in DISKS:
        path, free = Path(name), machine.space(Path(name)).get("free", FULL)
        if free < FULL:
            yield f"{name} is full"
        elif path.is_dir() and (why := _unwritable(path)):
            yield f"cannot write to {name}: {why}"


def _unwritable(folder: Path) -> str:
    """Why no file can be made in a folder; "" if one can."""
    path = folder / f".hpcddp-{token(4)}"
    try:
        path.write_bytes(machine.PAGE)
        path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _shared(run: RunDir, number: int) -> Iterator[str]:
    """A run folder in which this node does not see the attempt, or cannot write."""
    folder, until = run.attempt(number), time.monotonic() + VISIBLE
    while not folder.facts.exists():
        if time.monotonic() > until:
            yield f"does not see the attempt's folder {folder.path}"
            return
        time.sleep(0.1)
    if why := _unwritable(folder.path):
        yield f"cannot write to the run folder: {why}"


def _network(first: str, boot: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Faults of the network: an interface is down, or the first node cannot be reached."""
    there = ["lo", *dict(machine.interfaces())]
    for name in sorted({environ[n] for n in INTERFACES if n in environ}):
        # NCCL takes the beginning of a name, and lists with other characters.
        if name.isalnum() and not any(own.startswith(name) for own in there):
            yield f"the network interface {name} is missing or down"
    if boot == boot_id():
        return
    address = machine.route_to(first)
    if not address:
        yield f"has no route to {first}, the rendezvous host"
    elif address.startswith("127.") or address == "::1":
        yield f"resolves {first}, the rendezvous host, to itself"
