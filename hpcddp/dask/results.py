"""Files from the ranks to the client, with the names of dask-pytorch-ddp."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcddp.errors import HpcddpError, RankError, UserError
from hpcddp.rank_results import Data, check, opened, place, writing_attempt
from hpcddp.rundir import AttemptDir, token

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hpcddp.dask.ranks import Ranks


class Outbox:
    """A rank's connection to its worker, which runs Dask's threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._pid = pipe, os.getpid()
        self._turn = threading.RLock()

    def receive(self) -> Any:
        return self._pipe.recv()

    def send(self, key: str, item: tuple[str, bytes]) -> None:
        """Put an item into a Dask queue.

        When this returns the scheduler has the item, and keeps it even if the rank fails.
        """
        if os.getpid() != self._pid:
            raise UserError(
                "cannot be called in a data worker",
                where="submit_result",
                hint="return the data with the batch, and submit it in the training loop",
            )
        with self._turn:
            self._pipe.send((key, item))
            self._pipe.recv()

    def answer(self, answer: object) -> None:
        """Send how the rank has ended."""
        with self._turn:
            self._pipe.send(answer)


outbox: Outbox | None = None  # set in the process of a rank


class DaskResultsHandler:
    """Ranks submit results, and the client writes each of them to a file while the ranks train.

    Example::

        handler = DaskResultsHandler()
        ranks = hpcddp.dask.start(client, train, handler)
        handler.process_results("results", ranks)

    Args:
        pub_sub_key: Name of the Dask queue for the results. Default: a new name.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        self.key = pub_sub_key or f"hpcddp-results-{token(8)}"

    def submit_result(self, path: str, data: Data) -> None:
        """Send a file to the client, from a rank or from another Dask task.

        When this returns the scheduler has the file: the client writes it even if the rank fails.

        Args:
            path: Path below the client's folder. A later file replaces an earlier one.
            data: bytes, a string (written as UTF-8), or the ``Path`` of a local file to send.

        Raises:
            UserError: The path leads out of the folder, the data has another type, the local file
                is not readable, or the caller is a data worker.
        """
        check(path)
        with opened(path, data) as source:
            item = (path, source.read())
        if outbox is not None:  # a rank sends through its worker
            outbox.send(self.key, item)
        else:
            from distributed import Queue

            Queue(self.key).put(item)

    def process_results(
        self, prefix: str | os.PathLike[str], futures: Ranks, raise_errors: bool = True
    ) -> None:
        """Write results until all ranks have ended.

        Args:
            prefix: Folder for the results; made if it does not exist.
            futures: The result of ``hpcddp.dask.start``.
            raise_errors: Raise the error of a failed rank, after its results are written. If False,
                print it.

        Raises:
            UserError: ``futures`` is not a result of ``hpcddp.dask.start``.
            RankError: A rank failed. All ranks are ended.
            HpcddpError: A result cannot be written. The others are, and all ranks are ended.
            LeaseLost: The folder is in the client's own run, whose attempt was superseded.
        """
        from distributed import Queue

        if not hasattr(futures, "client"):
            raise UserError(
                f"expected the result of hpcddp.dask.start, got a {type(futures).__name__}",
                where="process_results",
                hint="use hpcddp.dask.start, or dispatch.run, to start the ranks",
            )
        queue, folder = Queue(self.key, client=futures.client), Path(prefix)
        attempt = writing_attempt(folder)
        try:
            futures.results(lambda: _write(_waiting(queue), folder, attempt))
        except RankError as error:
            if raise_errors:
                raise
            print(error, file=sys.stderr)


def _waiting(queue: Any) -> list[tuple[str, bytes]]:
    """The items in a queue. None without a scheduler: other code reports that error."""
    try:
        items: list[tuple[str, bytes]] = queue.get(batch=True)
    except OSError:
        return []
    return items


def _write(items: list[tuple[str, bytes]], folder: Path, attempt: AttemptDir | None) -> None:
    """Write all items, also after one has failed: no other process has them."""
    errors = []
    for path, data in items:
        try:
            place(folder, path, data, attempt)
        except HpcddpError as error:
            errors.append(error)
    if errors:
        raise errors[0]
