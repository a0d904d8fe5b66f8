"""The rendezvous of the ranks: each sends a report on itself, and all read the same verdict.

They use one store, which rank 0 hosts and the process group uses too. The last rank to arrive
checks all reports; then all ranks train, or none.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore

from hpcddp.attempt.error_record import host
from hpcddp.errors import RankMapError
from hpcddp.processes import start_of
from hpcddp.topology import Rank
from hpcddp.train.rank import devices
from hpcddp.train.rank.cpus import quota

LONGEST = 0.25  # seconds between two tries to reach rank 0


def open_store(rank: Rank, address: tuple[str, int] | None, timeout: float) -> Store:
    """The store of the rendezvous, hosted by rank 0 or by the agent of torchrun.

    Raises:
        RankMapError: rank 0 cannot listen, or cannot be reached.
    """
    if rank.world_size == 1:
        return HashStore()
    where = f"rank {rank.world_rank} on {host()}"
    if address is None:
        raise RankMapError(
            "MASTER_ADDR or MASTER_PORT is not set",
            where=where,
            hint="start the ranks with the run's script",
        )
    name, port = address
    main, late = rank.world_rank == 0, time.monotonic() + timeout
    if not main:
        await_listener(address, timeout)
    try:
        store = TCPStore(
            name,
            port,
            is_master=main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            wait_for_workers=False,
            timeout=timedelta(seconds=max(late - time.monotonic(), 1.0)),
        )
    except dist.DistError as error:
        if main:
            what = f"cannot listen on port {port}: {_first_line(error)}"
            hint = "free the port, or start only one process as rank 0"
        else:
            what = f"cannot reach rank 0 at {name}:{port} within {timeout:g} s"
            hint = "see `hpcddp logs --rank 0`, and look for a firewall between the nodes"
        raise RankMapError(what, where=where, hint=hint) from None
    store.set_timeout(timedelta(seconds=timeout))
    return store


def await_listener(address: tuple[str, int], timeout: float) -> None:
    """Wait until a port accepts connections; any other answer than a refusal ends it, too.

    torch's own client tries again after half a second at first, and later up to a minute.
    """
    until, pause = time.monotonic() + timeout, 0.01
    while time.monotonic() < until:
        try:
            socket.create_connection(address, timeout).close()
        except ConnectionRefusedError:
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST)
        except OSError:
            return
        else:
            return


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0]


def report(rank: Rank, shown: Mapping[str, Any]) -> dict[str, Any]:
    """A rank's report on itself.

    Args:
        shown: the report on its device.
    """
    return {
        "rank": rank.world_rank,
        "node": rank.node,
        "local": rank.local_rank,
        "host": host(),
        "cpus": ranges(os.sched_getaffinity(0)),
        "quota": quota(),
        **shown,
        **_identity(),
    }


def _identity() -> dict[str, Any]:
    """A process's identity: its id is unique within its namespace and lifetime."""
    space = ""
    with contextlib.suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return {"pid": os.getpid(), "start": start_of(os.getpid()), "space": space}


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def meet(store: Store, rank: Rank, report: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Send this rank's report and wait for the verdict on all reports."""
    number, size = rank.world_rank, rank.world_size
    if store.add(f"hpcddp/claim/{number}", 1) > 1:
        raise RankMapError(
            f"two processes are rank {number}; the second is on {report['host']}, "
            f"process {report['pid']}",
            hint="start the ranks with the run's script, which gives each process its own rank",
        )
    store.set(f"hpcddp/rank/{number}", json.dumps(report))
    if store.add("hpcddp/arrived", 1) == size:
        texts = store.multi_get([f"hpcddp/rank/{n}" for n in range(size)])
        reports = [json.loads(text) for text in texts]
        devices.check_lost(reports)
        devices.check_shared(reports)
        store.set("hpcddp/verdict", json.dumps({"ranks": reports}))
    try:
        store.wait(["hpcddp/verdict"], timedelta(seconds=timeout))
    except dist.DistStoreError:
        raise _missing(store, size, timeout) from None
    verdict = json.loads(store.get("hpcddp/verdict"))
    if "error" in verdict:
        raise RankMapError(**verdict["error"])
    ranks: list[dict[str, Any]] = verdict["ranks"]
    return ranks


def refuse(store: Store, error: RankMapError) -> None:
    """Send the error to the waiting ranks; the first error counts."""
    facts = {"what": error.what, "where": error.where, "hint": error.hint, **error.facts}
    text = json.dumps({"error": facts})
    store.compare_set("hpcddp/verdict", "", text)


def _missing(store: Store, size: int, timeout: float) -> RankMapError:
    absent = ranges(n for n in range(size) if not store.check([f"hpcddp/rank/{n}"]))
    word = "rank" if absent.isdecimal() else "ranks"
    return RankMapError(
        f"of {size} ranks, {word} {absent} did not reach the rendezvous within {timeout:g} s",
        hint="see their lines with `hpcddp logs --rank N`; to wait longer, export "
        "HPCDDP_START_TIMEOUT=SECONDS before you submit",
    )
