"""How fast each rank computes, node after node: the other nodes wait meanwhile.

One measurement may meet another program on the node. A rank counts as slow only if it is slow in
a second measurement too, in turn with the ranks that were fastest in the first one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SLOW = 0.75  # of the median: below, a rank is measured again, and slow if it is again
ROUNDS = (4, 8)  # turns of each node in the first and the second measurement
TURN = 0.25  # seconds of a turn
WHOLE = 60.0  # seconds of a whole measurement, at most
CPU_SIZE, GPU_SIZE = 384, 4096  # rows of the square matrices


def work(device: torch.device) -> Callable[[float], tuple[int, float]]:
    """A function that multiplies matrices for some seconds: operations and seconds.

    The matrices are square, float32 on CPUs and bfloat16 on GPUs; a product of size n counts as
    2 n^3 operations.
    """
    import torch

    on_gpu = device.type == "cuda"
    size = GPU_SIZE if on_gpu else CPU_SIZE
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def run(seconds: float) -> tuple[int, float]:
        torch.mm(a, b)
        wait()
        count, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            torch.mm(a, b)
            wait()
            count += 1
        return count * 2 * size**3, spent

    return run


def measure(
    run: Callable[[float], tuple[int, float]],
    turns: Collection[int],
    node: int,
    barrier: Callable[[], object],
    rounds: int,
    whole: float = WHOLE,
) -> float:
    """The rate of this rank in operations per second; 0 if its node has no turn.

    Args:
        turns: the nodes that are measured.
        node: of this rank.
        barrier: waits for all ranks.
        whole: seconds of the whole measurement, at most.
    """
    seconds = min(TURN, whole / (rounds * len(turns)))
    operations, spent = 0, 0.0
    for _ in range(rounds):
        for each in sorted(turns):
            barrier()
            if each == node:
                done, took = run(seconds)
                operations, spent = operations + done, spent + took
    barrier()
    return operations / spent if spent else 0.0


def candidates(rates: Sequence[float]) -> list[int]:
    """The ranks that are slow by the first measurement."""
    usual = statistics.median(rates)
    return [rank for rank, rate in enumerate(rates) if rate < SLOW * usual]


def references(rates: Sequence[float], nodes: Sequence[int], slow: Sequence[int]) -> set[int]:
    """The nodes to compare with: as many as have slow ranks, the fastest ones.

    Args:
        nodes: of each rank.
    """
    bad = {nodes[rank] for rank in slow}
    well = {node: 0.0 for node in nodes if node not in bad}
    for rank, node in enumerate(nodes):
        if node in well:
            well[node] = max(well[node], rates[rank])
    return set(sorted(well, key=lambda node: -well[node])[: max(1, len(bad))])


def confirmed(
    again: Sequence[float], nodes: Sequence[int], slow: Sequence[int], well: Collection[int]
) -> dict[int, float]:
    """The ranks that are slow again -> their part of the usual rate.

    Args:
        again: the rates of the second measurement.
        well: the nodes to compare with; if there are none, all other ranks.
    """
    usual = [rate for rank, rate in enumerate(again)
             if rate and rank not in slow and (not well or nodes[rank] in well)]  # fmt: skip
    if not usual:
        return {}
    median = statistics.median(usual)
    return {rank: again[rank] / median for rank in slow if again[rank] < SLOW * median}
