"""Retries on a disk that may be away for a while: all ranks retry together, and fail together.

An I/O error may pass: a server restarts, a mount is missing, a permission changes. The saved files
are still there a minute later, so the ranks retry. A training at its end waits for the disk too:
without its last save, the next attempt repeats all steps since the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from hpcddp.attempt.error_record import host
from hpcddp.errors import CheckpointUnreadable
from hpcddp.train.rank.world import World

SECONDS = 300.0  # of retries
PAUSE = 5.0  # seconds between two tries

T = TypeVar("T")


class ElsewhereError(OSError):
    """An I/O error of another rank, known to all ranks."""

    def __init__(self, rank: int, error: OSError) -> None:
        super().__init__(error.errno or errno.EIO, error.strerror or str(error), error.filename)
        self.rank = rank


class _ReadFailure(NamedTuple):
    """A file that a rank could not read."""

    rank: int
    host: str
    file: str
    why: str


class DiskRetry:
    """Retries on all ranks for a limited time.

    Args:
        touch: called at each try, since retries are not a hang.
        seconds: until the ranks give up, by rank 0's clock.
        pause: seconds between two tries.
    """

    def __init__(
        self,
        world: World,
        touch: Callable[[], object] = lambda: None,
        *,
        seconds: float | None = None,
        pause: float | None = None,
    ) -> None:
        self.world, self.touch = world, touch
        self._seconds = SECONDS if seconds is None else seconds
        self._pause = PAUSE if pause is None else pause

    def read(self, work: Callable[[], T]) -> T:
        """This rank's result; a collective. While ``work`` raises an OSError on any rank, all ranks
        repeat it.

        Raises:
            CheckpointUnreadable: on all ranks, after the time limit.
        """
        began, printed = 0.0, False
        while True:
            result, trouble = self._try(work)
            began = began or time.monotonic()  # the first try may take long and succeed
            reports = self.world.gather((trouble, time.monotonic() - began))
            first = next((trouble for trouble, _ in reports if trouble), None)
            if first is None:
                return cast(T, result)
            if reports[0][1] >= self._seconds:
                raise self._given_up(first)
            if self.world.is_main and not printed:
                say(
                    f"rank {first.rank} on {first.host} cannot read {first.file}: {first.why}; "
                    f"all ranks retry for up to {self._seconds:g} s"
                )
            printed = True
            self.touch()
            time.sleep(self._pause)

    def until(self, done: Callable[[], bool], failure: str) -> bool:
        """Retry until done or the time limit; whether it is done. A collective.

        Args:
            done: one try; the result is the same on all ranks.
            failure: the text of the line that rank 0 prints once.
        """
        began, printed = time.monotonic(), False
        while not done():
            if self.world.gather(time.monotonic() - began >= self._seconds)[0]:
                return False
            if self.world.is_main and not printed:
                say(f"{failure}; all ranks retry for up to {self._seconds:g} s")
            printed = True
            self.touch()
            time.sleep(self._pause)
        return True

    def _try(self, work: Callable[[], T]) -> tuple[T | None, _ReadFailure | None]:
        try:
            return work(), None
        except OSError as error:
            rank, name = self.world.rank.world_rank, host()
            if isinstance(error, ElsewhereError) and error.rank != rank:
                rank, name = error.rank, self.world.reports[error.rank]["host"]
            why = error.strerror or str(error)
            return None, _ReadFailure(rank, name, str(error.filename or "a checkpoint"), why)

    def _given_up(self, first: _ReadFailure) -> CheckpointUnreadable:
        return CheckpointUnreadable(
            f"rank {first.rank} on {first.host} cannot read it: {first.why}",
            {"rank": first.rank, "host": first.host},
            where=first.file,
            hint=f"check the file system; all ranks retried for {self._seconds:g} s",
        )


def alone(work: Callable[[], T], seconds: float = SECONDS) -> T:
    """One rank's result, while the others wait for it; an OSError is retried.

    Raises:
        OSError: after so many seconds.
    """
    began = time.monotonic()
    while True:
        try:
            return work()
        except OSError:
            if time.monotonic() - began >= seconds:
                raise
        time.sleep(PAUSE)


def say(text: str) -> None:
    """Print a line; under some launchers, the output goes to the disk that is away."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file to an OSError raised within: that of a read names none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
