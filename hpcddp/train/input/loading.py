"""Chooses the number of processes that read a rank's data (``data.workers``), and gives advice.

Data in memory gets no processes: the transfer of a batch would cost more than reading it. To know,
a separate process reads a few micro-batches and measures the time, so that the training does not
see files or random numbers that the dataset uses there. The number of computing threads is the same
either way: the last bit of sums on a CPU depends on it, and must not depend on a measurement. The
ranks agree on the result, and save it in the checkpoints, so a resumed run reads in the same way.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from hpcddp.spec import JobSpec
from hpcddp.train.input.batches import TrainData
from hpcddp.train.input.data_workers import end_workers, make_loader, read
from hpcddp.train.input.samples import Samples, prefetch_of
from hpcddp.train.rank import cpus
from hpcddp.train.rank.cpus import Division
from hpcddp.train.rank.world import World

QUICK = 2e-3  # seconds: a micro-batch read faster needs no process
TRIES = 6  # measured micro-batches, of unread samples; the fastest one counts
LOOK_SECONDS = 0.5  # time limit of the measurement, after which no further try starts
PATIENCE = 60.0  # seconds after which the measurement is given up


def settle(
    known: dict[str, Any] | None, spec: JobSpec, world: World, data: TrainData
) -> tuple[Division, dict[str, Any] | None]:
    """Divide this rank's CPUs, and set its threads; a collective if ``data.workers`` is -1.

    Args:
        known: the second result as saved in the checkpoint, or None.

    Returns:
        the division, and the measured result for the checkpoint, None without a measurement.
    """
    count, device = cpus.share(world.reports, world.rank.world_rank), world.device.type
    division = cpus.divide(count, device, spec.data.workers)
    division = division._replace(threads=cpus.limit_threads(division.threads))
    if spec.data.workers < 0:
        of = [spec.task, spec.dataset]
        if known is None or known.get("of") != of:
            quick = not division.workers or is_quick(data.dataset, data.first(TRIES), spec.seed)
            known = {"of": of, "quick": all(world.gather(quick))}
        if known["quick"]:
            division = division._replace(workers=0)
    return division, known


def is_quick(dataset: Any, batches: list[list[int]], seed: int) -> bool:
    """Whether reading a micro-batch takes almost no time, or is impossible in another process.
    Never for a dataset that fetches ahead itself, or one that exceeds the time of a measurement.

    Args:
        batches: the sample indices.
    """
    if prefetch_of(dataset):
        return False
    look = _Look(Samples(dataset, seed), batches)
    device = torch.device("cpu")
    loader = make_loader(look, 1, device, generator=torch.Generator(), timeout=PATIENCE)
    began = time.monotonic()
    try:
        return float(next(read(loader))) < QUICK
    except Exception:  # other errors will occur and be reported in the training
        return time.monotonic() - began < PATIENCE
    finally:
        end_workers(loader)


class _Look(Dataset[float]):
    """A dataset of one item: the seconds to read a micro-batch, or a single sample if that takes
    too long."""

    def __init__(self, samples: Samples, batches: list[list[int]]) -> None:
        self._samples, self._batches = samples, batches

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        first, *rest = self._batches
        self._seconds(first[:1])  # opens files and finds the generators in use
        end = time.monotonic() + LOOK_SECONDS
        alone = self._best([[code] for code in (first * TRIES)[1:TRIES]], end)
        return alone if alone > QUICK else self._best(rest or [first] * TRIES, end)

    def _best(self, batches: list[list[int]], end: float) -> float:
        """The least seconds, until one is quick or the time is over."""
        best = math.inf
        for codes in batches:
            best = min(best, self._seconds(codes))
            if best < QUICK or time.monotonic() > end:
                break
        return best

    def _seconds(self, codes: list[int]) -> float:
        began = time.perf_counter()
        default_collate(self._samples.__getitems__(codes))
        return time.perf_counter() - began


def is_far(dataset: Any, *, again: bool) -> bool:
    """Whether samples come over a network, by the dataset's method ``far``.

    Args:
        again: all samples were read before.
    """
    far = getattr(dataset, "far", None)
    return callable(far) and bool(far(again=again))


def hint(workers: int, count: int, *, key: str = "data.workers", far: bool = False) -> str:
    """Advice if the training waits for its data.

    Args:
        workers: reading processes of a rank.
        count: CPUs of a rank.
        key: the name of the setting for ``workers``.
        far: the data comes from a store, not from the node's cache.
    """
    more = f"ask for more CPUs, such as --sbatch cpus-per-task={max(4, 2 * count)}"
    if count == 1:
        return f"one CPU both reads and computes: {more}"
    if not workers:
        best = max(1, min(count // 2, cpus.MOST))
        return f"the training process reads the data itself: set {key} to {best}"
    if far:
        return (
            "the data comes from a store: copy it to the nodes with data.stage, enlarge "
            "data.cache, or pack the data into tar shards"
        )
    if workers < count - 1:
        return f"{key} is {workers} of {count} CPUs: try {min(2 * workers, count - 1)}"
    return f"{key} is {workers} of {count} CPUs: if all are busy, {more}"
