"""Files from the ranks to the client, under the names that users of dask-pytorch-ddp know."""

from __future__ import annotations

import os
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from hpcddp.errors import RankError, UserError
from hpcddp.rundir import token, write_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from hpcddp.dask.ranks import Ranks

outbox: Connection | None = None  # to the worker, in a process that is a rank


class DaskResultsHandler:
    """Ranks submit results, and the client writes each once, as a file, while they train.

        handler = DaskResultsHandler()
        ranks = hpcddp.dask.start(client, train, handler)
        handler.process_results("results", ranks)

    Args:
        pub_sub_key: the name of their queue; a new one if it is empty.
    """

    def __init__(self, pub_sub_key: str = "") -> None:
        self.key = pub_sub_key or f"hpcddp-results-{token(8)}"

    def submit_result(self, path: str, data: bytes | str) -> None:
        """Send a file, from a rank or from any other task of Dask.

        Args:
            path: in the client's folder; a later file takes the place of an earlier one.
            data: text is written as UTF-8.
        """
        check(path)
        if not isinstance(data, bytes | str):
            raise UserError(
                f"a result is bytes or text, and not {type(data).__name__}", where=path,
                hint="json.dumps and pickle.dumps make them",
            )  # fmt: skip
        item = (path, data.encode() if isinstance(data, str) else data)
        if outbox is not None:  # this process has none of Dask's threads; its worker has
            outbox.send((self.key, item))
        else:
            from distributed import Queue

            Queue(self.key).put(item)

    def process_results(
        self, prefix: str | os.PathLike[str], futures: Ranks, raise_errors: bool = True
    ) -> None:
        """Write what comes until all ranks have ended.

        Args:
            prefix: the folder; made if it is not there.
            futures: what ``hpcddp.dask.start`` gave.
            raise_errors: a rank that fails is an error here, when what came before it is written.
        """
        from distributed import Queue

        if not hasattr(futures, "client"):
            raise UserError(
                f"these are no running ranks, but a {type(futures).__name__}",
                where="process_results",
                hint="give what hpcddp.dask.start returned; hpcddp.dask.run waits for the ranks",
            )
        queue, folder = Queue(self.key, client=futures.client), Path(prefix)

        def write() -> None:
            for path, data in queue.get(batch=True):
                place(folder, path, data)

        try:
            futures.results(write)
        except RankError as error:
            if raise_errors:
                raise
            print(error, file=sys.stderr)


def check(path: str) -> None:
    """A path stays in its folder, wherever that is."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise UserError(
            f"the path {path!r} leaves the folder of results, or names none of its files",
            where="submit_result",
            hint="give a relative one without ..",
        )


def place(folder: Path, path: str, data: bytes) -> None:
    """Write one result; a link in the folder does not lead out of it either."""
    check(path)
    target = folder / path
    if not target.parent.resolve().is_relative_to(folder.resolve()):
        raise UserError("a link leads out of the folder of results", where=str(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, data)
    except OSError as error:
        raise UserError(
            f"a result cannot be written: {error.strerror}", where=str(target),
            hint="another result may have taken a folder of its path for its name",
        ) from None  # fmt: skip
