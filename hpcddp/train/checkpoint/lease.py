"""The right to write in a run dir: it is the newest attempt's, also while an older one still runs.

A node that lost touch with Slurm trains on while the next attempt begins. The disk decides
(fence.py): an attempt publishes out of a folder of its own, which the next one takes away.
By looks at the run dir a superseded attempt learns besides that it must leave.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from hpcddp.attempt.fence import fence
from hpcddp.errors import LeaseLost
from hpcddp.rundir import RunDir
from hpcddp.train.checkpoint import disk_retry
from hpcddp.train.rank.world import World

LOOK_SECONDS = 1.0  # between two looks at the run dir in the loop


class Lease:
    """One rank's knowledge of whether its attempt owns the run dir; rank 0 looks, and tells.

    ``lost`` never becomes false again.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self.run, self.attempt = run, attempt
        self.folder = run.saving(attempt)
        self.lost = False
        self._next_look = 0.0

    def take(self, world: World) -> None:
        """Make the folder to publish from, once in an attempt; a collective.

        Raises:
            LeaseLost: on all ranks, if a newer attempt has begun.
            OSError: on rank 0; the disk is away, and the folder was made in its place.
        """
        if world.is_main:
            disk_retry.alone(self._make)
            # Looked at afterwards: a newer attempt comes before this look, or its fence comes
            # after the folder.
            if self.run.outlived(self.attempt):
                self.drop()
                self.lost = True
        lost = [self.lost]
        if world.size > 1:
            dist.broadcast_object_list(lost, src=0, group=world.control)
        self.lost = lost[0]
        if self.lost:
            raise self.error()

    def _make(self) -> None:
        self.run.job.stat()  # else another file system lies over the run's
        fence(self.run, self.attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run.job.stat()

    def held(self) -> bool:
        """Look at the run dir whether the attempt may still publish; rank 0 only. A file system
        that is out of reach for a moment, or has another one in its place, takes nothing away: a
        newer attempt is there before it takes the folder."""
        with contextlib.suppress(OSError):
            self.lost = self.lost or self.run.outlived(self.attempt)
        return not self.lost

    def look(self, clock: float) -> bool:
        """``held``, on disk once a second at most; by the monotonic clock."""
        if clock >= self._next_look:
            self._next_look = clock + LOOK_SECONDS
            self.held()
        return not self.lost

    def drop(self) -> None:
        """Leave nothing behind, where all is published."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def error(self) -> LeaseLost:
        """The error of a rank that must leave."""
        return LeaseLost(
            f"attempt {self.attempt} may not write here any more: a newer one has begun",
            where=str(self.run.path),
        )
