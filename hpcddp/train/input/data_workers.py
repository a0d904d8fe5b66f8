"""The processes that read for a rank: a DataLoader of our own, its errors, and its end."""

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

PIN_SECONDS = 5.0  # that the thread which pins memory gets to end


def make_loader(
    dataset: Any, workers: int, device: torch.device, *, prefetch: int = 2, **options: Any
) -> DataLoader[Any]:
    """A DataLoader whose worker processes leave stopping to the rank; for ``read``.

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
        HpcddpError: as it was raised, also in a worker process: torch brings its traceback alone.
    """
    with held_back():  # processes begin here
        batches = iter(loader)
    for batch in batches:
        if isinstance(batch, HpcddpError):
            raise batch
        yield batch


class _Telling(Dataset[Any]):
    """A dataset whose own errors stand in the place of a batch."""

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
    """Let forked processes collect nothing of their parent's: the destructor of a process group
    would wait there for threads that only the parent has. Memory stays shared, too."""
    os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def end_workers(loader: DataLoader[Any]) -> None:
    """End a loader's processes now. They have nothing to lose; garbage collection, in whatever
    thread, would wait seconds for each that is busy."""
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
    """End the thread that pins the processes' batches, as torch does, but not for ever: a process
    killed in the middle of a batch would leave it reading."""
    if not hasattr(iterator, "_pin_memory_thread"):
        return
    iterator._pin_memory_thread_done_event.set()
    iterator._worker_result_queue.put((None, None))
    iterator._pin_memory_thread.join(PIN_SECONDS)
    if iterator._pin_memory_thread.is_alive():
        iterator._worker_result_queue.cancel_join_thread()
        del iterator._pin_memory_thread  # torch would wait for it
