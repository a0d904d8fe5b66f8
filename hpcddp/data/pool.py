"""A few threads that fetch data. They are daemon threads, unlike those of concurrent.futures: a
process can end while one of them waits minutes for a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Pool:
    """A number of threads, which end with ``close`` or with the process."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        for _ in range(threads):
            Thread(target=_serve, args=(self._work,), daemon=True).start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put((future, call))
        return future

    def map(self, call: Callable[[U], T], items: Iterable[U]) -> list[T]:
        """The results for all items. Raises the first error."""
        futures = [self.submit(lambda item=item: call(item)) for item in items]  # type: ignore[misc]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Let the threads end after all submitted calls."""
        for _ in range(self._threads):
            self._work.put(None)


def _serve(work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while job := work.get():
        future, call = job
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del job, future, call  # keep no reference to the fetched bytes
