"""The processes that read for a rank: hpcddp's DataLoader, its errors, and its end."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils import signal_handling

from hpcddp.errors import HpcddpError
from hpcddp.preempt import held_back, ignore_stop_signals

PIN_SECONDS = 5.0  # to wait for the thread that pins memory


def make_loader(
    dataset: Any, workers: int, device: torch.device, *, prefetch: int = 2, **options: Any
) -> DataLoader[Any]:
    """A DataLoader whose worker processes ignore stop signals, for ``read``.

    Args:
        prefetch: batches that each process reads ahead.
    """
    if workers:
        leave_garbage()
        options["prefetch_factor"] = prefetch
    return DataLoader(
        _Telling(dataset),
        collate_fn=_collated,
        num_workers=workers,
        worker_init_fn=ignore_stop_signals if workers else None,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        **options,
    )


def read(loader: DataLoader[Any]) -> Iterator[Any]:
    """The batches of a ``make_loader``.

    Raises:
        HpcddpError: the original error, even of a worker process, where torch raises another one.
    """
    with held_back():  # processes start here
        batches = iter(loader)
    for batch in batches:
        if isinstance(batch, HpcddpError):
            raise batch
        yield batch


class _Telling(Dataset[Any]):
    """A dataset that returns an HpcddpError in place of a batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        try:
            if whole := getattr(self._dataset, "__getitems__", None):
                return whole(indices)
            return [self._dataset[index] for index in indices]
        except HpcddpError as error:
            return error


def _collated(samples: Any) -> Any:
    return samples if isinstance(samples, HpcddpError) else default_collate(samples)


@functools.cache
def leave_garbage() -> None:
    """Keep forked processes from collecting their parent's garbage: the destructor of a process
    group would wait for threads that exist only in the parent. It also keeps memory shared."""
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def end_workers(loader: DataLoader[Any]) -> None:
    """End a loader's processes at once. They have no state to save; garbage collection would wait
    seconds for each busy one."""
    iterator: Any = loader._iterator
    if iterator is None or not getattr(iterator, "_workers", None):
        return
    _end_pinning(iterator)
    signal_handling._remove_worker_pids(id(iterator))  # else torch raises where one is killed
    iterator._worker_pids_set = False
    for process in iterator._workers:
        process.kill()
    iterator._shutdown_workers()
    loader._iterator = None


def _end_pinning(iterator: Any) -> None:
    """End the thread that pins batches, as torch does, but with a time limit: a process killed in
    the middle of a batch would leave the thread reading."""
    if not hasattr(iterator, "_pin_memory_thread"):
        return
    iterator._pin_memory_thread_done_event.set()
    iterator._worker_result_queue.put((None, None))
    iterator._pin_memory_thread.join(PIN_SECONDS)
    if iterator._pin_memory_thread.is_alive():
        iterator._worker_result_queue.cancel_join_thread()
        del iterator._pin_memory_thread  # torch would wait for it
