"""Saves in the background: a thread of every rank copies, writes and publishes.

1. ``save``, between two steps, copies at once the state that the next forward pass changes
   (buffers, random generators, numbers of scheduler and scaler, the position).
2. During the next forward and backward pass, the thread copies the tensors that only the optimizer
   changes; ``join`` waits for that copy before the optimizer's step.
3. The thread writes and publishes the checkpoint (save_writer.py).

A save that fails on one rank fails on all: its files are removed, older checkpoints stay, the
training continues, and the next save tries again. A save that cannot be read back has failed. One
save runs at a time. A save that is due while another one runs waits for it, and is never skipped:
if saves take longer than the steps between them, the training waits for the disk.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hpcddp.errors import CheckpointError
from hpcddp.train.checkpoint import checkpoint, publish, snapshot
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.host_copy import HostCopies
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.save_writer import RunningSave, SaveWriter
from hpcddp.train.checkpoint.snapshot import FrameworkFiles, Live, Position
from hpcddp.train.monitor.metrics import Recorder, earlier_saves
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank.spread import Spread

FIRST = 5.0  # seconds assumed for a save before the first one of a run
LATEST = 10  # number of saves whose times are kept
GRACE = 5.0  # seconds to wait for a running save after the training failed


class Saver:
    """One rank's part in saving. All methods but ``poll``, ``join`` and ``close`` are collectives.

    Args:
        keep: number of checkpoints to keep, the newest.
        saved: the step at which the attempt resumed; None for a new run.

    Raises:
        CheckpointUnreadable: the list of checkpoints could not be read.
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
        self._world, self._retry = spread.world, retry
        self._folder = lease.run.checkpoints
        self._staging = HostCopies(self._world.device)
        self._writer = SaveWriter(lease, self._world, self._staging, keep)
        self._times: deque[float] = deque(maxlen=LATEST)  # seconds of the latest saves
        if self._world.is_main:
            publish.tidy(self._folder)
            self._times.extend(earlier_saves(lease.run, lease.attempt))
        self.begin_from(saved)
        self._thread: threading.Thread | None = None
        self._current: RunningSave | None = None
        self._joined = True
        self._again = True  # after a failed save: a retry may succeed

    @property
    def took(self) -> float:
        """Seconds that a save may take: the slowest of the latest saves. Those of earlier attempts
        are known on rank 0 only, which alone checks the time limit."""
        return max(self._times, default=FIRST)

    @property
    def passed(self) -> set[int]:
        """Steps of newer checkpoints that the training does not use. Rank 0 forgets those that the
        training has replaced."""
        return self._writer.passed

    def begin_from(self, saved: int | None) -> None:
        """Note that the training continues from this step; newer checkpoints are unused."""
        self.saved = saved  # the newest step on disk
        steps = self._retry.read(
            lambda: checkpoint.steps(self._folder) if self._world.is_main else []
        )
        steps = self._world.gather(steps)[0]
        self._writer.passed = {step for step in steps if saved is None or step > saved}

    def save(self, at: Position, facts: dict[str, Any], looked: float = 0.0) -> None:
        """Start to save this step, unless it is saved.

        Args:
            facts: further plain data for meta.json.
            looked: seconds that the loop has already waited for this save.

        Raises:
            LeaseLost: a newer attempt owns the run folder.
        """
        self.wait()
        if self.saved == at.step:
            return
        began = time.monotonic()
        if self._live.files:
            self._save_files(self._live.files, at, facts)
            return
        parts = state_dict.parts(self._live.module, self._live.optimizer, self._spread.holders)
        meta = snapshot.meta(self._lease, self._spread, self._live, at, facts)
        rank = self._world.rank.world_rank
        self._staging.take(self._now(parts), state_dict.share(parts.stepped, parts.where, rank))
        meta = json.loads(snapshot.text(meta))
        self._current = RunningSave(at.step, meta, parts, began)
        _ = self._world.saving  # all ranks create this group here together
        self._thread = threading.Thread(target=self._writer.run, args=(self._current,), daemon=True)
        self._thread.start()
        self._joined = False
        self._current.blocked = looked + time.monotonic() - began

    def _save_files(self, files: FrameworkFiles, at: Position, facts: dict[str, Any]) -> None:
        """Save at once: a framework writes its files from the live objects."""
        began = time.monotonic()
        meta = snapshot.meta(self._lease, self._spread, self._live, at, facts)
        self._current = RunningSave(at.step, meta, files, began)
        self._writer.run(self._current)
        self._current.blocked = self._current.seconds
        self._end()

    def _now(self, parts: state_dict.Parts) -> dict[str, Tensor]:
        """This rank's share of the tensors that the next forward pass changes. Of ranks with the
        same random numbers, one writes them. If buffers differ between their holders, the first
        holder's are written."""
        rank, place = self._world.rank.world_rank, self._spread.place
        tensors = {n: t for n, t in parts.loose.items() if parts.where[n].holders[0] == rank}
        if place.tp == 0:
            tensors |= state_dict.rng_tensors(self._spread.stream, self._world.device)
        if self._world.is_main and self._live.more:
            tensors |= state_dict.pack(self._live.more)
        if self._live.hook:
            tensors |= self._live.hook.memory()
        return tensors

    def join(self) -> None:
        """Wait until the weights may change."""
        if not self._joined:
            with self._blocked():
                self._staging.join()
            self._joined = True

    def poll(self) -> None:
        """Record a save that has ended, if any."""
        if self._thread and not self._thread.is_alive():
            self._end()

    def wait(self) -> None:
        """Wait for a running save, if any.

        Raises:
            LeaseLost: a newer attempt owns the run folder.
        """
        if self._thread:
            with self._blocked():
                self._thread.join()
            self._end()
        if self._lease.lost:
            raise self._lease.error()

    def finish(self, at: Position, facts: dict[str, Any]) -> bool:
        """Save this step, unless it is saved, and wait; whether it is saved now."""
        self.save(at, facts)
        self.wait()
        return self.saved == at.step

    def last(self, at: Position, facts: dict[str, Any], asked: Callable[[], bool]) -> bool:
        """Save the training's last step; False at a stop request before it is saved.

        Args:
            asked: whether all ranks agree to stop; called after a failed save.

        Raises:
            CheckpointError: no save succeeds.
        """
        failure = f"cannot save the last step, {at.step}"

        def over() -> bool:
            return self.finish(at, facts) or not self._again or asked()

        if not self._retry.until(over, failure) or (self.saved != at.step and not self._again):
            hint = "free space; the next attempt continues from the newest checkpoint"
            raise CheckpointError(failure, where=str(self._folder), hint=hint)
        return self.saved == at.step

    def close(self) -> None:
        """Wait a short time for a running save: the training may have failed."""
        if self._thread:
            self._thread.join(GRACE)
            done = self._current
            if done and not (self._thread.is_alive() or done.error or done.reason):
                self.saved = done.step

    @contextlib.contextmanager
    def _blocked(self) -> Iterator[None]:
        began = time.monotonic()
        yield
        if self._current:
            self._current.blocked += time.monotonic() - began

    def _end(self) -> None:
        """Record how the save ended."""
        done, self._current, self._thread, self._joined = self._current, None, None, True
        assert done
        if done.error:
            raise done.error
        self._times.append(done.seconds)
        # If the loop waited for the save, the time until the loop continued counts.
        times = {"seconds": max(done.seconds, done.blocked), "blocked_s": done.blocked}
        if done.reason:
            self._again = done.again
            facts = {"reason": done.reason, "saved": self.saved}
            self._record("checkpoint_failed", step=done.step, **facts, **times)
            return
        self.saved = done.step
        path = f"{self._folder.name}/step-{done.step}"
        self._record("checkpoint", step=done.step, path=path, bytes=done.size, **times)
