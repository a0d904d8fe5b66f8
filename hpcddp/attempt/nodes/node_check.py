"""The light check of a node, on the node itself: what would end or spoil a job there.

It only finds what is certain, in a second at most besides the GPU driver's answer. A check-up that
also measures is `hpcddp doctor`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcddp.attempt import error_record
from hpcddp.attempt.nodes import machine
from hpcddp.rundir import RunDir, token

DISKS = ("/tmp", "/dev/shm")
FULL = 16 * 2**20  # bytes: with fewer a disk is full
VISIBLE = 5.0  # seconds until the attempt's folder must be visible
UNKNOWN = -1  # GPUs of a node whose driver does not answer in time
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for nodes on one machine


def answer(run: RunDir, number: int, first: str, boot: str) -> str:
    """The facts and faults of this node, as a line of JSON.

    Args:
        number: of the attempt.
        first: the address at which the first node's rank listens.
        boot: the first node's boot id.
    """
    gpus, trouble = machine.gpu_query()
    faults = [*_gpus(gpus or [], trouble), *_disks(), *_shared(run, number),
              *_network(first, boot, os.environ)]  # fmt: skip
    count = UNKNOWN if trouble == machine.SILENT else machine.gpu_count(gpus)
    facts = {"host": error_record.host(), "time": time.time(), "gpus": count}
    return json.dumps({**facts, "faults": faults})


def boot_id() -> str:
    """The id of this machine's boot; "" if unknown."""
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""


def _gpus(gpus: list[dict[str, Any]], trouble: str) -> Iterator[str]:
    """GPUs with faults that a job meets."""
    if trouble and trouble != machine.SILENT:
        yield f"nvidia-smi fails: {trouble}"
    for number, gpu in enumerate(gpus):
        if errors := machine.memory_errors(gpu):
            yield f"GPU {number} has uncorrected memory errors ({errors})"


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
