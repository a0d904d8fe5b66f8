"""The right to write in a run folder: only the newest attempt has it, even while an older one runs.

A node that lost contact with Slurm may train while the next attempt starts. The disk decides
(fence.py): an attempt publishes from a folder of its own, which the next attempt removes. A
superseded attempt also checks the run folder, sees the newer attempt, and exits.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from hpcddp.attempt.fence import fence
from hpcddp.errors import LeaseLost
from hpcddp.rundir import RunDir
from hpcddp.train.checkpoint import disk_retry
from hpcddp.train.rank.world import World

LOOK_SECONDS = 1.0  # between two checks of the run folder in the loop


class Lease:
    """Whether this rank's attempt still owns the run folder; rank 0 checks and tells the others.

    ``lost`` never becomes False again.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self.run, self.attempt = run, attempt
        self.folder = run.saving(attempt)
        self.lost = False
        self._next_look = 0.0

    def take(self, world: World) -> None:
        """Make the folder to publish from, once per attempt; a collective.

        Raises:
            LeaseLost: on all ranks, if a newer attempt owns the run folder.
            OSError: on rank 0, if the run's disk is missing.
        """
        if world.is_main:
            disk_retry.alone(self._make)
            # This check comes after the folder: a newer attempt starts before the check, or its
            # fence comes after the folder and removes it.
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
        self.run.job.stat()  # fails if another file system is mounted over the run's
        fence(self.run, self.attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run.job.stat()

    def held(self) -> bool:
        """Check in the run folder whether the attempt may still publish; rank 0 only. A file
        system that is missing for a moment changes nothing: a newer attempt first shows in the
        run folder, then removes the folder of this one."""
        with contextlib.suppress(OSError):
            self.lost = self.lost or self.run.outlived(self.attempt)
        return not self.lost

    def look(self, clock: float) -> bool:
        """``held``, which reads the disk at most once a second of the monotonic clock."""
        if clock >= self._next_look:
            self._next_look = clock + LOOK_SECONDS
            self.held()
        return not self.lost

    def drop(self) -> None:
        """Remove the folder if everything is published."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def error(self) -> LeaseLost:
        """The error of a superseded attempt."""
        return LeaseLost(
            f"attempt {self.attempt} is superseded: a newer attempt owns this run",
            where=str(self.run.path),
            hint="no action is needed: the newer attempt continues the run",
        )
