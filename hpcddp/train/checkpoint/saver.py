"""Saving beside the training: a thread of every rank copies, writes and publishes.

1. ``save``, between two steps: what the next forward pass changes is copied at once (buffers,
   random generators, the scheduler's and the scaler's numbers, the position).
2. The thread copies what only the optimizer changes, during the next forward and backward pass;
   ``join`` waits for that copy before the optimizer's step.
3. The thread writes with torch.distributed.checkpoint on a process group of its own, hashes,
   marks, publishes, and removes old checkpoints. The ranks agree after each of these acts.

A save that fails on one rank fails on all: what was written goes, older checkpoints stay, the
training goes on, and the next save tries again. A save that cannot be read back has failed. One
save runs at a time. A save that is asked for while one runs waits for it, and is never left out:
where saves take longer than the steps between them, the training waits for the disk.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from hpcddp.errors import CheckpointError, HpcddpError
from hpcddp.train.checkpoint import checkpoint, publish, snapshot
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.host_copy import Staging
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.monitor.metrics import Recorder, earlier_saves
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank.spread import Spread

FIRST = 5.0  # seconds that a save is thought to take before the first one of a run
LATEST = 10  # saves whose time counts
GRACE = 5.0  # seconds that a running save gets when the training failed

T = TypeVar("T")
# Checksums of a rank's tensors by their holders, and the numbers in its optimizer's state.
_Known = tuple[dict[tuple[int, ...], int], dict[str, dict[str, Any]]]


class _Failed(Exception):
    """The save failed, on all ranks together; the text is the first reason.

    Args:
        again: another try may succeed: it may be the disk.
    """

    def __init__(self, reason: str, again: bool = True) -> None:
        super().__init__(reason)
        self.again = again


@dataclass
class _Save:
    """One save, from the request to its end."""

    step: int
    meta: dict[str, Any]
    parts: state_dict.Parts
    began: float
    blocked: float = 0.0  # seconds that the loop's thread waited
    seconds: float = 0.0
    size: int = 0  # bytes
    reason: str = ""  # why it failed
    again: bool = True  # another try may succeed
    error: BaseException | None = None  # another rank is gone


class Saver:
    """One rank's part in saving. All methods but ``poll``, ``join`` and ``close`` are collectives.

    Args:
        keep: newest checkpoints that are kept.
        saved: the step that the attempt began from, if it was resumed.

    Raises:
        CheckpointUnreadable: which checkpoints there are could not be read.
    """

    def __init__(
        self,
        lease: Lease,
        spread: Spread,
        live: Live,
        record: Recorder,
        keep: int,
        saved: int | None,
        retry: DiskRetry,
    ) -> None:
        self._lease, self._spread, self._live, self._record = lease, spread, live, record
        self._world, self._keep, self._retry = spread.world, keep, retry
        self._folder = lease.run.checkpoints
        self._times: deque[float] = deque(maxlen=LATEST)  # seconds of the latest saves
        if self._world.is_main:
            publish.tidy(self._folder)
            self._times.extend(earlier_saves(lease.run, lease.attempt))
        self.begin_from(saved)
        self._staging = Staging(self._world.device)
        self._thread: threading.Thread | None = None
        self._current: _Save | None = None
        self._joined = True
        self._again = True  # after a save that failed: another try may succeed

    @property
    def took(self) -> float:
        """Seconds that a save may take: the slowest of the latest, of the life before too. Rank 0
        alone knows that one: it alone looks at the time limit."""
        return max(self._times, default=FIRST)

    def begin_from(self, saved: int | None) -> None:
        """The training goes on from this step: newer checkpoints were passed over."""
        self.saved = saved  # the newest step that is on disk
        there = self._retry.read(
            lambda: checkpoint.steps(self._folder) if self._world.is_main else []
        )
        self._passed = {step for step in there if saved is None or step > saved}

    def save(self, at: Position, facts: dict[str, Any], looked: float = 0.0) -> None:
        """Begin to save this step, unless it is saved.

        Args:
            facts: more plain data for meta.json.
            looked: seconds that the loop has waited for this save already.

        Raises:
            LeaseLost: a newer attempt owns the run dir.
        """
        self.wait()
        if self.saved == at.step:
            return
        began = time.monotonic()
        parts = state_dict.parts(self._live.module, self._live.optimizer, self._spread.holders)
        meta = snapshot.meta(self._lease, self._spread, self._live, at, facts)
        rank = self._world.rank.world_rank
        self._staging.take(self._now(parts), state_dict.share(parts.stepped, parts.where, rank))
        self._current = _Save(
            at.step, json.loads(json.dumps(meta, default=Tensor.tolist)), parts, began
        )
        _ = self._world.saving  # made by all ranks in the same place
        self._thread = threading.Thread(target=self._run, args=(self._current,), daemon=True)
        self._thread.start()
        self._joined = False
        self._current.blocked = looked + time.monotonic() - began

    def _now(self, parts: state_dict.Parts) -> dict[str, Tensor]:
        """What this rank writes of what the next forward pass changes. Ranks that draw the same
        random numbers have one writer. Where buffers differ between holders, the first's count."""
        rank, place = self._world.rank.world_rank, self._spread.place
        mine = {n: t for n, t in parts.loose.items() if parts.where[n].holders[0] == rank}
        if place.tp == 0:
            mine |= state_dict.rng_tensors(self._spread.stream, self._world.device)
        if self._world.is_main and self._live.more:
            mine |= state_dict.pack(self._live.more)
        if self._live.hook:
            mine |= self._live.hook.memory()
        return mine

    def join(self) -> None:
        """Wait until the weights may change."""
        if not self._joined:
            with self._blocked():
                self._staging.join()
            self._joined = True

    def poll(self) -> None:
        """Tell of a save that has ended."""
        if self._thread and not self._thread.is_alive():
            self._end()

    def wait(self) -> None:
        """Wait for the save that runs, if one does.

        Raises:
            LeaseLost: a newer attempt owns the run dir.
        """
        if self._thread:
            with self._blocked():
                self._thread.join()
            self._end()
        if self._lease.lost:
            raise self._lease.error()

    def finish(self, at: Position, facts: dict[str, Any]) -> bool:
        """Save this step if it is not saved, and wait; whether it is saved now."""
        self.save(at, facts)
        self.wait()
        return self.saved == at.step

    def last(self, at: Position, facts: dict[str, Any], asked: Callable[[], bool]) -> bool:
        """Save the training's last step; False if all ranks are asked to stop before it is saved.

        Args:
            asked: whether they are; it is called when a save has failed.

        Raises:
            CheckpointError: no save succeeds.
        """
        what = f"the last step, {at.step}, could not be saved"

        def over() -> bool:
            return self.finish(at, facts) or not self._again or asked()

        if not self._retry.until(over, what) or (self.saved != at.step and not self._again):
            hint = "make room; the run comes back, and goes on from the newest checkpoint"
            raise CheckpointError(what, where=str(self._folder), hint=hint)
        return self.saved == at.step

    def close(self) -> None:
        """Let a running save end, for a short time: the training may have failed."""
        if self._thread:
            self._thread.join(GRACE)

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        if self._current:
            self._current.blocked += time.monotonic() - began

    def _end(self) -> None:
        """Take in what became of the save."""
        done, self._current, self._thread, self._joined = self._current, None, None, True
        assert done
        if done.error:
            raise done.error
        self._times.append(done.seconds)
        # A save that was waited for took until the loop went on.
        times = {"seconds": max(done.seconds, done.blocked), "blocked_s": done.blocked}
        if done.reason:
            self._again = done.again
            facts = {"reason": done.reason, "saved": self.saved}
            self._record("checkpoint_failed", step=done.step, **facts, **times)
            return
        self.saved = done.step
        path = f"{self._folder.name}/step-{done.step}"
        self._record("checkpoint", step=done.step, path=path, bytes=done.size, **times)

    # From here on in the saving thread.

    def _run(self, save: _Save) -> None:
        try:
            self._write(save)
        except BaseException as error:  # a collective failed: the loop's thread shall say so
            save.error = error
        finally:
            self._staging.release()
        save.seconds = time.monotonic() - save.began

    def _write(self, save: _Save) -> None:
        aside = self._lease.folder / f"step-{save.step}"
        try:
            self._together(self._staging.copy)
            self._alike(self._together(lambda: self._prepare(aside, save)), save)
            self._together(lambda: self._write_share(aside, save))
            files = self._together(lambda: self._own_files(aside))
            sizes = self._together(lambda: self._publish(aside, save, files))
            save.size = sizes[0]
        except _Failed as failed:
            save.reason, save.again = str(failed), failed.again
        if save.reason:
            (held, *_) = self._together(self._undo)
            self._lease.lost = not held

    def _together(self, work: Callable[[], T]) -> list[T]:
        """What each rank's work came to, by rank; _Failed on all of them if it failed on one."""
        rank = self._world.rank.world_rank
        mine: tuple[T | None, _Failed | None]
        try:
            mine = work(), None
        except HpcddpError as error:
            mine = None, _Failed(error.what)
        except Exception as error:
            reason = f"rank {rank}: {type(error).__name__}: {error}"
            mine = None, _Failed(reason, again=isinstance(error, OSError))
        everyone: list[Any] = self._world.gather(mine, self._world.saving)
        if failed := next((failed for _, failed in everyone if failed), None):
            raise failed
        return [result for result, _ in everyone]

    def _prepare(self, aside: Path, save: _Save) -> _Known:
        """Make the folder, if this attempt may; what this rank knows of."""
        if self._world.is_main:
            if not self._lease.held():
                raise self._lease.error()
            publish.empty(self._lease.folder)
            aside.mkdir()
        return _names(save.parts), save.parts.plain

    def _alike(self, known: list[_Known], save: _Save) -> None:
        """Take in the numbers of all ranks' optimizers, which have the same tensors where they
        should: else one might be written by nobody."""
        sums: dict[tuple[int, ...], int] = {}
        for names, plain in known:
            save.meta["optimizer"]["state"].update(plain)
            for holders, found in names.items():
                if sums.setdefault(holders, found) != found:
                    reason = "the ranks' models or optimizers have not the same tensors"
                    raise _Failed(reason, again=False)

    def _write_share(self, aside: Path, save: _Save) -> None:
        # After the copy, which the loop waits for: it takes long.
        from hpcddp.train.checkpoint import dcp_files

        where, copies = save.parts.where, self._staging.ready()
        slices = {
            name: dcp_files.Slice.of(copy, where[name].size, where[name].offsets)
            if name in where
            else copy
            for name, copy in copies.items()
        }
        dcp_files.write(aside, slices, self._world.saving)

    def _own_files(self, aside: Path) -> dict[str, dict[str, Any]]:
        rank = self._world.rank.world_rank
        return {path.name: checkpoint.digest(path) for path in aside.glob(f"__{rank}_*")}

    def _publish(self, aside: Path, save: _Save, files: list[dict[str, dict[str, Any]]]) -> int:
        """Rank 0: the checkpoint's size in bytes, once it is there."""
        if not self._world.is_main:
            return 0
        all_files = {name: entry for part in files for name, entry in part.items()}
        size = publish.mark(aside, all_files, save.meta)
        if not self._lease.held():
            raise self._lease.error()
        publish.publish(aside, self._folder / aside.name)
        self._passed.discard(save.step)
        best = save.meta["best"].get("step")
        publish.prune(self._folder, self._keep, best, self._passed)
        return size

    def _undo(self) -> bool:
        """Rank 0: remove what was written; whether the attempt still owns the run dir."""
        if not self._world.is_main:
            return True
        with contextlib.suppress(OSError):
            publish.empty(self._lease.folder)
        return self._lease.held()


def _names(parts: state_dict.Parts) -> dict[tuple[int, ...], int]:
    """A checksum of which tensors there are, by who holds them."""
    sums: dict[tuple[int, ...], int] = {}
    for name in sorted(parts.where):
        size, offsets, holders = parts.where[name]
        text = f"{name} {tuple(size)} {offsets}"
        sums[holders] = zlib.crc32(text.encode(), sums.get(holders, 0))
    return sums
