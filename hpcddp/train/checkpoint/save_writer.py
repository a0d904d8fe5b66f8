"""One save in a background thread: writes and publishes the tensors.

The thread writes with torch.distributed.checkpoint on a process group of its own, hashes, marks,
publishes, and removes old checkpoints. The ranks agree after each of these acts: an act that fails
on one rank fails on all, and then they remove the written files.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hpcddp.errors import HpcddpError
from hpcddp.train.checkpoint import damage, publish
from hpcddp.train.checkpoint.host_copy import HeldTensors, HostCopies
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.snapshot import FrameworkFiles
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank.world import World

T = TypeVar("T")
# Checksums of a rank's tensors by their holders, and the numbers in its optimizer's state.
_Known = tuple[dict[tuple[int, ...], int], dict[str, dict[str, Any]]]


class _SaveFailed(Exception):
    """The save failed, on all ranks together; the message is the first reason.

    Args:
        again: a retry may succeed: the disk may be the cause.
    """

    def __init__(self, reason: str, again: bool = True) -> None:
        super().__init__(reason)
        self.again = again


@dataclass
class RunningSave:
    """One save, from its start to its end."""

    step: int
    meta: dict[str, Any]
    state: state_dict.Parts | FrameworkFiles  # what is saved
    began: float
    blocked: float = 0.0  # seconds that the loop's thread waited
    seconds: float = 0.0
    size: int = 0  # bytes
    reason: str = ""  # reason of the failure
    again: bool = True  # a retry may succeed
    error: BaseException | None = None  # another rank has ended


class SaveWriter:
    """One rank's part in writing a checkpoint.

    Args:
        staging: the copies of the tensors that this rank writes.
        keep: number of checkpoints to keep, the newest.
        folder: to write in, before publication; the lease's if none is given.
        check: raises an error if what was written must not be published.

    ``passed`` has the steps of newer checkpoints that the training did not use: they stay.
    """

    def __init__(
        self,
        lease: Lease,
        world: World,
        staging: HostCopies | HeldTensors,
        keep: int,
        folder: Path | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._lease, self._world, self._staging, self._keep = lease, world, staging, keep
        self._folder, self._own = lease.run.checkpoints, folder or lease.folder
        self._check, self.passed = check, set[int]()

    def run(self, save: RunningSave) -> None:
        """Save, and store the outcome in ``save``."""
        try:
            self._write(save)
        except BaseException as error:  # a collective failed: the loop's thread raises it
            save.error = error
        finally:
            self._staging.release()
        save.seconds = time.monotonic() - save.began

    def _write(self, save: RunningSave) -> None:
        aside = self._own / f"step-{save.step}"
        try:
            files = self._write_state(aside, save)
            if self._check:
                self._together(self._check)
            sizes = self._together(lambda: self._publish(aside, save, files))
            save.size = sizes[0]
        except _SaveFailed as failed:
            save.reason, save.again = str(failed), failed.again
        if save.reason:
            (held, *_) = self._together(self._undo)
            self._lease.lost = not held

    def _write_state(self, aside: Path, save: RunningSave) -> list[dict[str, dict[str, Any]]]:
        """Write the state into a new folder; the files of each rank."""
        state = save.state
        if not isinstance(state, state_dict.Parts):
            self._together(lambda: self._prepare(aside))
            return self._together(lambda: _digests(aside, state.write(aside), sync=True))
        self._together(self._staging.copy)
        self._alike(self._together(lambda: self._prepare(aside, state)), save)
        self._together(lambda: self._write_share(aside, state))
        rank = self._world.rank.world_rank
        return self._together(lambda: _digests(aside, aside.glob(f"__{rank}_*")))

    def _together(self, work: Callable[[], T]) -> list[T]:
        """The results of all ranks' work, by rank.

        Raises:
            _SaveFailed: on all ranks, if it failed on one.
        """
        rank = self._world.rank.world_rank
        outcome: tuple[T | None, _SaveFailed | None]
        try:
            outcome = work(), None
        except HpcddpError as error:
            outcome = None, _SaveFailed(error.what)
        except Exception as error:
            reason = f"rank {rank}: {type(error).__name__}: {error}"
            outcome = None, _SaveFailed(reason, again=isinstance(error, OSError))
        outcomes: list[Any] = self._world.gather(outcome, self._world.saving)
        if failed := next((failed for _, failed in outcomes if failed), None):
            raise failed
        return [result for result, _ in outcomes]

    def _prepare(self, aside: Path, parts: state_dict.Parts | None = None) -> _Known:
        """Make the folder, if this attempt may write; the tensors of this rank."""
        if self._world.is_main:
            if not self._lease.held():
                raise self._lease.error()
            publish.empty(self._own)
            aside.mkdir()
        return (_names(parts), parts.plain) if parts else ({}, {})

    def _alike(self, known: list[_Known], save: RunningSave) -> None:
        """Add the numbers of all ranks' optimizers to the meta.

        Raises:
            _SaveFailed: holders of the same part have different lists of tensors: a rank might skip
                one that no other rank writes.
        """
        sums: dict[tuple[int, ...], int] = {}
        for names, plain in known:
            save.meta["optimizer"]["state"].update(plain)
            for holders, checksum in names.items():
                if sums.setdefault(holders, checksum) != checksum:
                    reason = "the models or optimizers of the ranks have different tensors"
                    raise _SaveFailed(reason, again=False)

    def _write_share(self, aside: Path, parts: state_dict.Parts) -> None:
        # Imported after the copy, which the loop waits for: the import takes long.
        from hpcddp.train.checkpoint import dcp_files

        where, copies = parts.where, self._staging.ready()
        slices = {
            name: dcp_files.Slice.of(copy, where[name].size, where[name].offsets)
            if name in where
            else copy
            for name, copy in copies.items()
        }
        dcp_files.write(aside, slices, self._world.saving, alone=self._world.size == 1)

    def _publish(
        self, aside: Path, save: RunningSave, files: list[dict[str, dict[str, Any]]]
    ) -> int:
        """Publish, on rank 0; the checkpoint's size in bytes."""
        if not self._world.is_main:
            return 0
        all_files = {name: entry for part in files for name, entry in part.items()}
        size = publish.mark(aside, all_files, save.meta)
        if not self._lease.held():
            raise self._lease.error()
        publish.publish(aside, self._folder / aside.name)
        self.passed.discard(save.step)
        best = save.meta["best"].get("step")
        publish.prune(self._folder, self._keep, best, self.passed)
        return size

    def _undo(self) -> bool:
        """Remove the written files, on rank 0; whether the attempt still owns the run folder."""
        if not self._world.is_main:
            return True
        with contextlib.suppress(OSError):
            publish.empty(self._own)
        return self._lease.held()


def _digests(
    aside: Path, paths: Iterable[Path], *, sync: bool = False
) -> dict[str, dict[str, Any]]:
    """The entries of files for COMPLETE.

    Args:
        sync: fsync the files first.
    """
    entries = {}
    for path in paths:
        if sync:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        entries[str(path.relative_to(aside))] = damage.digest(path)
    return entries


def _names(parts: state_dict.Parts) -> dict[tuple[int, ...], int]:
    """A checksum of the tensors' names and offsets, by their holders."""
    sums: dict[tuple[int, ...], int] = {}
    for name in sorted(parts.where):
        size, offsets, holders = parts.where[name]
        text = f"{name} {tuple(size)} {offsets}"
        sums[holders] = zlib.crc32(text.encode(), sums.get(holders, 0))
    return sums
