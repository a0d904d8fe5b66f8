"""How fast the network between the ranks is: all of them together, and each pair of nodes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

KB, MB = 1024, 1024**2
SIZES = (4 * KB, 64 * KB, 1 * MB, 16 * MB, 64 * MB)  # bytes
CPU_SIZES = SIZES[:4]
REPEATS = {4 * KB: 20, 64 * KB: 20, 1 * MB: 8, 16 * MB: 3, 64 * MB: 3}
PAIR = 16 * MB  # bytes that a pair exchanges, each way
PAIR_REPEATS = 3
MOST_NODES = 64  # of which each pair is measured


def all_reduce(device: torch.device, ranks: int) -> list[dict[str, float]]:
    """Times of an all-reduce of float32 by size, on all ranks.

    Returns:
        For each size in bytes the median time in seconds and the bus bandwidth in bytes per
        second: 2 (n - 1) / n of the size over the time, as in NVIDIA's nccl-tests.
    """
    import torch
    import torch.distributed as dist

    rows = []
    for size in SIZES if device.type == "cuda" else CPU_SIZES:
        tensor = torch.ones(size // 4, device=device)
        times = _times(lambda t=tensor: dist.all_reduce(t), device, REPEATS[size])  # type: ignore[misc]
        median = statistics.median(times)
        bus = 2 * (ranks - 1) / ranks * size / median if median else 0.0
        rows.append({"bytes": size, "seconds": median, "bus": bus})
    return rows


def _times(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    call()  # buffers and connections are made
    wait()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return times


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Each pair of `count` nodes once, in rounds in which no node has two partners.

    It is the circle method of round-robin tournaments.
    """
    even = count + count % 2
    ring = list(range(even))
    for _ in range(even - 1):
        pairs = zip(ring[: even // 2], reversed(ring[even // 2 :]), strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if max(pair) < count]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def pairs(
    device: torch.device, node: int, leader: bool, leaders: list[int], barrier: Callable[[], object]
) -> dict[int, float]:
    """Bandwidth in bytes per second between this node and each later one; on its leader alone.

    Args:
        leader: this rank speaks for its node.
        leaders: the rank that speaks for each node.
        barrier: waits for all ranks.
    """
    import torch

    made: dict[int, float] = {}
    tensor = torch.ones(PAIR // 4, device=device)
    for each in rounds(len(leaders)) if len(leaders) <= MOST_NODES else ():
        barrier()
        partner = next((b if a == node else a for a, b in each if node in (a, b)), None)
        if not leader or partner is None:
            continue
        times = _times(lambda p=partner: _swap(tensor, leaders[p], node < p),  # type: ignore[misc]
                       device, PAIR_REPEATS)  # fmt: skip
        if node < partner:
            made[partner] = 2 * PAIR / statistics.median(times)
    barrier()
    return made


def _swap(tensor: torch.Tensor, partner: int, first: bool) -> None:
    """Send a tensor to another rank, and receive it back."""
    import torch.distributed as dist

    for send in (first, not first):
        dist.send(tensor, partner) if send else dist.recv(tensor, partner)
