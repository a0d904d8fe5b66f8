"""Files from the ranks to the client, under the names that users of dask-pytorch-ddp know."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcddp.errors import HpcddpError, RankError, UserError
from hpcddp.rank_results import Data, check, life, opened, place
from hpcddp.rundir import AttemptDir, token

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hpcddp.dask.ranks import Ranks


class Outbox:
    """A rank's way to its worker, which has Dask's threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._pid = pipe, os.getpid()
        self._turn = threading.RLock()

    def receive(self) -> Any:
        return self._pipe.recv()

    def send(self, key: str, item: tuple[str, bytes]) -> None:
        """Put an item into a queue of Dask's. It is with the scheduler when this returns, and stays
        there even if the rank fails."""
        if os.getpid() != self._pid:
            raise UserError(
                "a rank sends results, and none of its data workers",
                where="submit_result",
                hint="return it with the batch, and submit it in the loop",
            )
        with self._turn:
            self._pipe.send((key, item))
            self._pipe.recv()

    def answer(self, answer: object) -> None:
        """Say how the rank has ended."""
        with self._turn:
            self._pipe.send(answer)


outbox: Outbox | None = None  # in a process that is a rank


class DaskResultsHandler:
    """Ranks submit results, and the client writes each once, as a file, while they train.

        handler = DaskResultsHandler()
        ranks = hpcddp.dask.start(client, train, handler)
        handler.process_results("results", ranks)

    Args:
        pub_sub_key: the name of their queue; a new one if there is none.
    """

    def __init__(self, pub_sub_key: str | None = None) -> None:
        self.key = pub_sub_key or f"hpcddp-results-{token(8)}"

    def submit_result(self, path: str, data: Data) -> None:
        """Send a file, from a rank or from any other task of Dask. It is not lost any more when
        this returns: the client writes it, also when the rank then fails.

        Args:
            path: in the client's folder; a later file takes the place of an earlier one.
            data: bytes, text (written as UTF-8), or the Path of a local file, which is sent whole.

        Raises:
            UserError: the path leaves the folder, or there is no such file or data.
        """
        check(path)
        with opened(path, data) as source:
            item = (path, source.read())
        if outbox is not None:  # this process has none of Dask's threads; its worker has
            outbox.send(self.key, item)
        else:
            from distributed import Queue

            Queue(self.key).put(item)

    def process_results(
        self, prefix: str | os.PathLike[str], futures: Ranks, raise_errors: bool = True
    ) -> None:
        """Write the results that come until all ranks have ended.

        Args:
            prefix: the folder; made if it is not there.
            futures: the result of ``hpcddp.dask.start``.
            raise_errors: a rank that fails is an error here, after all earlier results are written.

        Raises:
            RankError: a rank has failed; all are ended.
            HpcddpError: a result cannot be written; the others are, and all ranks are ended.
            LeaseLost: the client's own run, in which the folder lies, has a newer attempt.
        """
        from distributed import Queue

        if not hasattr(futures, "client"):
            raise UserError(
                f"these are no running ranks, but a {type(futures).__name__}",
                where="process_results",
                hint="give what hpcddp.dask.start returned; hpcddp.dask.run waits for the ranks",
            )
        queue, folder = Queue(self.key, client=futures.client), Path(prefix)
        attempt = life(folder)
        try:
            futures.results(lambda: _write(_waiting(queue), folder, attempt))
        except RankError as error:
            if raise_errors:
                raise
            print(error, file=sys.stderr)


def _waiting(queue: Any) -> list[tuple[str, bytes]]:
    """The items in a queue; none when its scheduler is gone, which is an error elsewhere."""
    try:
        items: list[tuple[str, bytes]] = queue.get(batch=True)
    except OSError:
        return []
    return items


def _write(items: list[tuple[str, bytes]], folder: Path, attempt: AttemptDir | None) -> None:
    """Write every item, also after one has failed: the others are in this process alone."""
    errors = []
    for path, data in items:
        try:
            place(folder, path, data, attempt)
        except HpcddpError as error:
            errors.append(error)
    if errors:
        raise errors[0]
