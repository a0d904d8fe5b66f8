"""How many processes read a rank's data (``data.workers``), and what to do where that is too slow.

Data that is in memory anyway gets no processes: a batch would cost more on its way than it does to
read. Whether it is so is seen by a look at a micro-batch, in a process of its own: whatever a
dataset opens, draws or counts there, the training does not see. As many threads compute either way:
sums on a CPU depend on that in their last bit, and must not depend on a stopwatch. The ranks agree
on the answer, and it goes into the checkpoints: a run that comes back reads as it did.
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

QUICK = 2e-3  # seconds in which a micro-batch is read that needs no process
TRIES = 6  # micro-batches of which the quickest counts: each of samples that were not read yet
LOOK_SECONDS = 0.5  # after which there is no other try
PATIENCE = 60.0  # seconds that a look may take


def settle(
    known: dict[str, Any] | None, spec: JobSpec, world: World, data: TrainData
) -> tuple[Division, dict[str, Any] | None]:
    """Divide this rank's CPUs, and set its threads; a collective if ``data.workers`` is -1.

    Args:
        known: the second result when the checkpoint was written, or None.

    Returns:
        the division, and the result of the look for the checkpoint, None without a look.
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
    """Whether a micro-batch is read in next to no time. Also where none can be read in another
    process at all; never of what reads ahead by itself, from a store, nor of what takes too long
    for a look.

    Args:
        batches: the samples' indices.
    """
    if prefetch_of(dataset):
        return False
    look = _Look(Samples(dataset, seed), batches)
    device = torch.device("cpu")
    loader = make_loader(look, 1, device, generator=torch.Generator(), timeout=PATIENCE)
    began = time.monotonic()
    try:
        return float(next(read(loader))) < QUICK
    except Exception:  # whatever else than time it is, the training meets it and tells of it
        return time.monotonic() - began < PATIENCE
    finally:
        end_workers(loader)


class _Look(Dataset[float]):
    """One item: the seconds in which a micro-batch was read, or a single sample that takes too
    long."""

    def __init__(self, samples: Samples, batches: list[list[int]]) -> None:
        self._samples, self._batches = samples, batches

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        first, *rest = self._batches
        self._seconds(first[:1])  # opens files, notes which generators are drawn from
        end = time.monotonic() + LOOK_SECONDS
        alone = self._best([[code] for code in (first * TRIES)[1:TRIES]], end)
        return alone if alone > QUICK else self._best(rest or [first] * TRIES, end)

    def _best(self, batches: list[list[int]], end: float) -> float:
        """The seconds of the quickest, until one is quick or the time is over."""
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
    """Whether samples come over a network, as a dataset's method ``far`` tells.

    Args:
        again: all of them were read before.
    """
    far = getattr(dataset, "far", None)
    return callable(far) and bool(far(again=again))


def hint(workers: int, count: int, *, key: str = "data.workers", far: bool = False) -> str:
    """Advice for a training that waits for its data.

    Args:
        workers: processes that read for a rank.
        count: its CPUs.
        key: what sets the first.
        far: the data comes from a store, and not from the node's cache.
    """
    more = f"ask for more CPUs, such as --sbatch cpus-per-task={max(4, 2 * count)}"
    if count == 1:
        return f"one CPU reads and computes: {more}"
    if not workers:
        best = max(1, min(count // 2, cpus.MOST))
        return f"the training reads by itself: {key} = {best} gives that to other processes"
    if far:
        return (
            "the data comes from a store: data.stage copies it to the node before the training, "
            "a data.cache that is large enough keeps it there once it was read, tar shards take "
            "fewer requests"
        )
    if workers < count - 1:
        return f"{key} is {workers} of {count} CPUs: try {min(2 * workers, count - 1)}"
    return f"{key} is {workers} of {count} CPUs: if all are busy, {more}"
