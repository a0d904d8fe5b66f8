"""Staging, before the task is loaded: the first rank of each node copies the data, and all ranks
wait for all nodes.

Nodes may differ by many minutes, longer than a collective waits. So the ranks look into their store
twice a second. Rank 0 alone decides, so that all ranks do the same: train, stop as requested, or
fail.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

from hpcddp import record as records
from hpcddp.data.node_cache import leftovers
from hpcddp.data.stage import StagedCopy, folder_of
from hpcddp.errors import HpcddpError, RunError, StageError
from hpcddp.preempt import Preemption
from hpcddp.rundir import read_json
from hpcddp.spec import JobSpec
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.rank.world import World

LOOK = 0.5  # seconds between two looks into the store
LEAD = 30.0  # seconds before the time limit at which staging ends

_numbers = itertools.count()  # of stagings in this process, the same on all ranks
_there: dict[tuple[str, ...], Path] = {}  # folders that this process has staged


class Arrival:
    """The agreement of all ranks that the data is on all nodes.

    Args:
        deadline: end of the time limit, in seconds since the epoch; 0 for none.
    """

    def __init__(
        self, world: World, lease: Lease, preemption: Preemption, heartbeat: Heartbeat,
        deadline: float,
    ) -> None:  # fmt: skip
        self._world, self._store, self._lease = world, world.store, lease
        self._preemption, self._heartbeat, self._deadline = preemption, heartbeat, deadline
        self._prefix = f"hpcddp/stage/{next(_numbers)}"
        self._nodes = world.size // world.rank.local_size
        self._next_look = 0.0
        self._signs = self._beats = 0
        self._asked = False
        self._verdict: dict[str, Any] | None = None

    def wait(self, stage: StagedCopy | None) -> dict[str, Any]:
        """Wait for rank 0's verdict: an ``error``, ``lost``, the reason to stop as ``by``, or an
        empty one.

        Args:
            stage: the copy that this rank makes meanwhile; None on other ranks.
        """
        with self._heartbeat.patience():
            if stage is not None:
                try:
                    if stage.copy(lambda: self._look(stage.signs)):
                        self._store.add(self._key("done"), 1)
                except HpcddpError as error:
                    text = json.dumps([error.what, error.where, error.hint, error.kind])
                    self._store.compare_set(self._key("error"), "", text)
            while self._verdict is None:
                self._look(self._signs)
                time.sleep(LOOK / 2)
            self._world.barrier()  # rank 0 hosts the store: it must not leave before all have read
        return self._verdict

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _look(self, signs: int) -> bool:
        """Exchange news with the other ranks; whether to continue."""
        clock = time.monotonic()
        if clock < self._next_look:
            return self._verdict is None
        self._next_look = clock + LOOK
        self._sign(signs)
        if not self._asked and (by := self._wish()):
            self._asked = True
            self._store.compare_set(self._key("stop"), "", by)
        if self._world.is_main:
            self._judge(clock)
        if self._store.check([self._key("verdict")]):
            self._verdict = json.loads(self._store.get(self._key("verdict")))
        return self._verdict is None

    def _sign(self, signs: int) -> None:
        """Touch the heartbeat if any node makes progress: then no rank hangs."""
        beats = self._store.add(self._key("beats"), int(signs != self._signs))
        if beats != self._beats:
            self._heartbeat.touch()
        self._signs, self._beats = signs, beats

    def _wish(self) -> str:
        """This rank's reason to stop: a signal or, on rank 0, a request or the time limit."""
        if self._preemption.requested:
            return self._preemption.signal or "asked"
        if self._world.is_main:
            if self._deadline and time.time() + LEAD > self._deadline:
                return "time limit"
            with contextlib.suppress(RunError):
                return str((read_json(self._lease.run.request) or {}).get("want", ""))
        return ""

    def _judge(self, clock: float) -> None:
        """Publish the verdict once it is known. Rank 0 only."""
        if not self._lease.look(clock):
            verdict: dict[str, Any] = {"lost": True}
        elif self._store.check([self._key("error")]):
            verdict = {"error": json.loads(self._store.get(self._key("error")))}
        elif self._store.check([self._key("stop")]):
            verdict = {"by": self._store.get(self._key("stop")).decode()}
        elif self._store.add(self._key("done"), 0) == self._nodes:
            verdict = {}
        else:
            return
        self._store.compare_set(self._key("verdict"), "", json.dumps(verdict))


def arrive(
    world: World,
    lease: Lease,
    spec: JobSpec,
    preemption: Preemption,
    heartbeat: Heartbeat,
    deadline: float,
) -> str:
    """Copy the job's data to all nodes, and set its folder in the environment.

    Returns: the reason to stop that came meanwhile; "" if the training can start.

    Raises:
        HpcddpError: on all ranks, if a node cannot get the data.
        LeaseLost: on all ranks, if a newer attempt owns the run folder.
    """
    entries = tuple(spec.data.stage)
    if entries in _there or not entries:
        return ""
    local = records.read(lease.run).backend == "local"
    folder = folder_of(lease.run, world.rank, local=local, environ=os.environ)
    stage = None
    if world.rank.local_rank == 0:
        stage = StagedCopy(folder, entries, spec.data.retry_seconds)
    verdict = Arrival(world, lease, preemption, heartbeat, deadline).wait(stage)
    if "lost" in verdict:
        lease.lost = True
        raise lease.error()
    if "error" in verdict:
        what, where, hint, kind = verdict["error"]
        error = StageError(what, where=where, hint=hint)
        error.kind = kind
        raise error
    os.environ["HPCDDP_STAGE"] = str(folder)
    if not verdict:
        _there[entries] = folder
    return str(verdict.get("by", ""))


def depart(world: World, spec: JobSpec) -> None:
    """Remove the staged data once no rank reads it any more."""
    if folder := _there.pop(tuple(spec.data.stage), None):
        world.barrier()
        if world.rank.local_rank == 0:
            leftovers.leave(folder)
