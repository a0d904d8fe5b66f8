"""Sets a user's own DataLoader to a position in an epoch, so that a resume reads the same batches.

The random numbers that a loader draws itself, for its order and its processes' seeds, follow from
the script's seed and the epoch, no longer from the number of earlier iterators.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from hpcddp.preempt import held_back, ignore_stop_signals
from hpcddp.processes import ignores
from hpcddp.train.input import loading
from hpcddp.train.input.data_workers import leave_garbage
from hpcddp.train.input.sampler import ResumableSampler
from hpcddp.train.input.seeding import mix
from hpcddp.train.rank.world import World

# 1 once this process ends its data workers; those that it forks see that too.
_ending = mmap.mmap(-1, 1)


class _Deaf:
    """Makes data workers ignore stop signals, then calls the user's own ``worker_init_fn``."""

    def __init__(self, own: Callable[[int], object] | None) -> None:
        self.own = own

    def __call__(self, worker: int) -> None:
        ignore_stop_signals(worker)
        if _ending[0]:  # the signal to end came before
            os._exit(0)
        if self.own:
            self.own(worker)


@functools.cache
def _end_workers_at_exit() -> None:
    """Kill data workers at exit: multiprocessing would send TERM, which they ignore, and hang."""
    atexit.register(_end_workers, os.getpid())


def _end_workers(owner: int) -> None:
    if os.getpid() != owner:  # a process that the script has forked
        return
    _ending[0] = 1
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker dies
    for process in multiprocessing.active_children():
        if process.daemon and process.pid and ignores(process.pid, signal.SIGTERM):
            process.kill()


def keep_workers(loader: Any) -> None:
    """Let a loader's processes ignore stop signals: their rank ends them."""
    loader = getattr(loader, "base_dataloader", loader)  # Accelerate wraps it
    if getattr(loader, "num_workers", 0) and not isinstance(loader.worker_init_fn, _Deaf):
        leave_garbage()
        _end_workers_at_exit()
        loader.worker_init_fn = _Deaf(loader.worker_init_fn)


def forking(loader: Any) -> contextlib.AbstractContextManager[None]:
    """Delays stop signals while the loader of ``keep_workers`` starts its processes."""
    deaf = isinstance(getattr(loader, "worker_init_fn", None), _Deaf)
    return held_back() if deaf else contextlib.nullcontext()


def batch_size(loader: Any) -> int:
    """Samples of one batch on one rank; 1 if the loader does not know."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None) or 1


class LoaderPosition:
    """The position of a rank's loaders.

    Args:
        seed: the script's seed on this rank.
        rank: global rank.
    """

    def __init__(self, seed: int, rank: int) -> None:
        self._own = mix(seed, rank)
        self._reads = 0  # epochs started
        self._workers, self._dataset = 0, None  # those of the last loader

    @classmethod
    def of(
        cls, world: World, seed: int, meta: dict[str, Any], fixed: dict[str, Any]
    ) -> LoaderPosition:
        """With the seed of the first attempt, if it had the same ranks; a collective.

        Args:
            seed: the script's seed on this rank, before a checkpoint is loaded.
            meta: of the checkpoint that this attempt continues from.
            fixed: for the meta of its own ones.
        """
        rank, known = world.rank.world_rank, meta.get("order_seeds") or []
        seed = known[rank] if len(known) == world.size else seed
        fixed["order_seeds"] = world.gather(seed)
        return cls(seed, rank)

    def begin(self, loader: Any, epoch: int, consumed: int, each: int) -> Iterator[Any]:
        """The loader's batches after the seen samples of the epoch. Its processes, if any, ignore
        stop signals from their start.

        Args:
            consumed: seen samples, over all ranks.
            each: samples of a batch, over all ranks.
        """
        skip = self._go_to(loader, epoch, consumed, each)
        with forking(loader):
            batches: Iterator[Any] = iter(loader)
        self._reads += 1
        self._workers = getattr(loader, "num_workers", 0)
        self._dataset = getattr(loader, "dataset", None)
        for _ in range(skip):
            next(batches, None)
        return batches

    def hint(self, count: int) -> str:
        """Advice if the loop waits for its data.

        Args:
            count: the rank's CPUs.
        """
        far = loading.is_far(self._dataset, again=self._reads > 1)
        return loading.hint(self._workers, count, key="num_workers", far=far)

    def _go_to(self, loader: Any, epoch: int, consumed: int, each: int) -> int:
        """Set a loader to the position after the seen samples.

        Returns: number of batches still to read and drop.
        """
        batches = getattr(loader, "batch_sampler", None)
        while inner := getattr(batches, "batch_sampler", None):  # Accelerate wraps it in a shard
            batches = inner
        sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
        keep_workers(loader)
        self._seed((loader, sampler), epoch)
        if isinstance(sampler, ResumableSampler):
            size = len(sampler.dataset)  # type: ignore[arg-type]
            sampler.set_position(epoch, min(consumed, size))
            return 0
        for owner in (sampler, batches, loader):
            if set_epoch := getattr(owner, "set_epoch", None):
                set_epoch(epoch)
        return consumed // each

    def _seed(self, owners: Iterable[Any], epoch: int) -> None:
        """Seed the generators of a loader and its sampler, which may share one. Without its own,
        either would draw from the default generator and change later random numbers."""
        owners = [owner for owner in owners if hasattr(owner, "generator")]
        for owner in owners:
            if owner.generator is None:
                owner.generator, owner.hpcddp_seed = torch.Generator(), self._own
            elif not hasattr(owner, "hpcddp_seed"):
                owner.hpcddp_seed = owner.generator.initial_seed()
        for owner in owners:
            owner.generator.manual_seed(mix(owner.hpcddp_seed, epoch))
