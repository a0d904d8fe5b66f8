"""Saves the step that this rank holds, when another rank has failed.

With ``ddp``, each rank has the whole state: between two optimizer steps, and through the next
forward and backward pass until the optimizer's step. So a rank whose peer is gone still has the
newest step. It tells the supervisor which step that is (attempt/link/slots.py). The supervisor
chooses one rank, which writes an ordinary checkpoint, without the others, and all leave. With
``hsdp`` and other products with ``ddp``, the ranks of one replica have the whole state together:
they write it over a group of their own.

A thread does this, as the loop may be anywhere: in a collective that waits for a lost rank (gloo
tells only the neighbours), in an evaluation, in a script that catches the error. It shuts down the
connections of this rank, which ends the collective, and lets the loop change nothing any more.

The next forward pass changes the buffers: they are copied after each step. Random numbers follow
from seed, rank and step, the schedule and the position from the step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hpcddp.attempt import exit_codes
from hpcddp.attempt.error_record import of_a_peer
from hpcddp.attempt.link import slots
from hpcddp.attempt.link.slots import Slot
from hpcddp.errors import CheckpointError
from hpcddp.train.checkpoint import publish, snapshot
from hpcddp.train.checkpoint.host_copy import HeldTensors
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.loose_copies import LooseCopies
from hpcddp.train.checkpoint.save_writer import RunningSave, SaveWriter
from hpcddp.train.checkpoint.saver import Saver
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank import connections
from hpcddp.train.rank.spread import Spread

LOOK = 0.05  # seconds between two looks at the alarm
PATIENCE = 3600.0  # seconds to wait for the verdict: another rank may save first
MOMENT = 0.5  # seconds to wait for the alarm at the end of a script
TURN = 5.0  # seconds for the loop to complete a step that is being taken
SLOWER = 3  # times the slowest save, for one of a part of the ranks
TOUCH = 1.0  # seconds between two signs of life while the loop waits
LEAVE = 10.0  # seconds for the loop to end the process, once nothing is left to save


class Rescue:
    """One rank's part in saving at a failure.

    Args:
        slot: where the parent of this rank reads and writes.
        saver: the saves of the loop.
        keep: number of checkpoints to keep, the newest.
        touch: called while this rank waits, which is no hang.

    ``able``: this rank may be called to save. ``levelled``: all ranks have the same buffers.
    ``suspect`` tells whether the numbers of this rank are bad.
    """

    def __init__(
        self, slot: Slot, lease: Lease, spread: Spread, live: Live, saver: Saver, keep: int,
        touch: Callable[[], object],
    ) -> None:  # fmt: skip
        self._slot, self._lease, self._spread, self._live = slot, lease, spread, live
        self._saver, self._keep, self._touch = saver, keep, touch
        self.able = False
        self.levelled = True
        self.suspect: Callable[[], bool] = lambda: False
        self._group: dist.ProcessGroup | None = None  # of the replica, if it is not this rank
        self._kept = set[int]()  # the sockets of that group
        self._loose: LooseCopies | None = None
        self._held: int | None = None  # the newest step that this rank has whole
        self._began = 0  # the step at which this attempt has begun
        self._turn = threading.Lock()  # of the loop, while it takes a step, or of the thread
        self._changing = False  # the loop has it
        self._called, self._over = threading.Event(), threading.Event()
        self._begun, self._done = threading.Event(), threading.Event()

    def begin(self, at: Position, describe: Callable[[], dict[str, Any]]) -> None:
        """Be ready from now on, if this rank can save; a collective.

        Args:
            describe: the meta of a checkpoint of the step that was marked last.
        """
        if not self._meet():
            self._loose = None
            return
        self._describe = describe
        self.restart(at)
        self._slot.join(min(self._spread.replica), len(self._spread.replica))
        self._slot.tell(slots.ARMED)
        threading.Thread(target=self._stand_by, name="hpcddp alarm", daemon=True).start()
        self.able = True

    def restart(self, at: Position) -> None:
        """Note the step from which the training continues: it is on disk."""
        self._began = at.step
        self.mark(at)

    def _meet(self) -> bool:
        """Whether all ranks are able; then make the groups of replicas of several ranks."""
        world, replica = self._spread.world, self._spread.replica
        everyone = world.gather((self._prepare(), replica))
        able = all(able for able, _ in everyone)
        if able and len(replica) > 1:
            before = connections.sockets()
            for ranks in sorted({tuple(ranks) for _, ranks in everyone}):
                group = dist.new_group(list(ranks), backend="gloo")
                self._group = group if world.rank.world_rank in ranks else self._group
            world.barrier()  # until all are connected
            self._kept = connections.sockets() - before
        return able

    def _prepare(self) -> bool:
        """Whether this rank can hold a step."""
        if not self._slot.shared or self._spread.world.device.type != "cpu":
            return False
        if not self._live.alike or not self._spread.replica:
            return False
        with contextlib.suppress(Exception):  # a model may save anything
            divided = self._spread.divided
            self._loose = LooseCopies(self._live.module, self._live.more, divided=divided)
            self._loose.take()
            self._parts()
            return True
        return False

    def close(self) -> None:
        """End the thread, unless it saves: this rank has nothing more to save."""
        if self.able and not self._begun.is_set():
            self.able = False
            self._over.set()
            self._slot.tell(slots.UNFIT)
            self._called.set()
            self._done.set()

    @property
    def levels(self) -> bool:
        """Whether the ranks must have the same buffers before the optimizer's step: any of them may
        have to save what rank 0 has. DDP gives them rank 0's only in the next forward pass."""
        return self.able and bool(self._loose)

    def change(self) -> None:
        """The optimizer changes the weights from now on, until ``mark``: there is no whole step.

        Raises:
            RuntimeError: another rank has failed, and what this one held is saved or not needed.
        """
        if self._changing or not self.able:
            return
        if not self._turn.acquire(blocking=False):
            self._wait()
            raise RuntimeError("Connection closed by peer: another rank has failed")
        self._changing = True

    def mark(self, at: Position) -> None:
        """Note that a step is complete, and keep what the next forward pass changes."""
        try:
            if self._loose is not None:
                self._loose.take()
            self._held = at.step
        except KeyError:  # the script has changed the model
            self._held = None
        if self._changing:
            self._changing = False
            self._turn.release()

    def fail(self, error: BaseException) -> None:
        """After a failure of the loop: if this rank has only lost another one, wait until its step
        is saved or not needed. What a rank holds that has failed by itself is not used."""
        if self._changing:
            self._changing, self._held = False, None
            self._turn.release()
        if not self.able:
            return
        if self._begun.is_set() or of_a_peer(error):
            self._called.set()
            self._wait()
        else:
            self.close()

    def _wait(self) -> None:
        """Wait until the step is saved or not needed."""
        while not self._done.wait(TOUCH):
            self._touch()

    def leave(self) -> None:
        """At the end of a script, which may have caught the error: wait a moment for the alarm."""
        until = time.monotonic() + MOMENT
        while self.able and not self._slot.alarm and time.monotonic() < until:
            time.sleep(LOOK / 5)
        if self.able and self._slot.alarm:
            self._wait()
        self.close()

    def _stand_by(self) -> None:
        """Wait for a failure, and save what this rank holds if it is chosen for that."""
        while not self._slot.alarm and not self._called.wait(LOOK):
            pass
        if self._over.is_set():
            return
        self._begun.set()
        try:
            connections.shut(self._kept)
            self._answer()
        except Exception as failed:  # such as one for want of descriptors
            print(f"hpcddp: the newest step is not saved: {failed}", file=sys.stderr, flush=True)
            self._slot.tell(slots.UNFIT)
        finally:
            self._done.set()
        time.sleep(LEAVE)
        os._exit(exit_codes.FAILED)

    def _answer(self) -> None:
        """Tell which step this rank holds, and save it if that is the verdict."""
        held = self._held if self._turn.acquire(timeout=TURN) else None
        held = held if held is not None and self._sound() else None
        self._slot.tell(slots.UNFIT if held is None else slots.WAITS, held or 0, self._seconds)
        if held is None or self._verdict(slots.NONE) != slots.SAVE:
            return
        self._saver.close()  # it has lost a rank too
        try:
            reason = self._write(held)
        except Exception as failed:
            reason = f"{type(failed).__name__}: {failed}"
        replica = self._spread.replica
        if self._spread.world.rank.world_rank == min(replica):
            who = f"rank{'s' * (len(replica) > 1)} {', '.join(map(str, replica))}"
            what = f"not saved: {reason}" if reason else f"saved by {who}"
            text = f"hpcddp: after the loss of a rank: step {held} {what}"
            print(text, file=sys.stderr, flush=True)
        self._slot.tell(slots.FAILED if reason else slots.SAVED, held)
        self._verdict(slots.SAVE)

    def _sound(self) -> bool:
        """Whether what this rank holds is of its step, and good. What a script saves besides its
        model, rank 0 has, and the right buffers, if those of the ranks differ."""
        assert self._loose is not None
        only_of_rank_0 = self._live.more or (len(self._loose) and not self.levelled)
        if (only_of_rank_0 and 0 not in self._spread.replica) or self.suspect():
            return False
        with contextlib.suppress(Exception):  # of a model that the script has changed
            return self._loose.sound(self._parts())
        return False

    def _parts(self) -> state_dict.Parts:
        assert self._loose is not None
        return self._loose.parts(self._live.optimizer, self._spread.holders)

    @property
    def _seconds(self) -> float:
        """Seconds that a save without the other replicas may take, which have shared its work."""
        world, replica = self._spread.world, self._spread.replica
        return SLOWER * self._saver.took * world.size / len(replica)

    def _verdict(self, known: int) -> int:
        """Wait for the supervisor's verdict; its newest.

        Args:
            known: the one before.
        """
        until = time.monotonic() + PATIENCE
        while self._slot.verdict == known and time.monotonic() < until:
            time.sleep(LOOK / 5)
        return self._slot.verdict

    def _write(self, step: int) -> str:
        """Write a checkpoint without the other replicas; the reason if that fails."""
        if step in (self._saver.saved, self._began):
            return ""
        gained = self._saver.saved not in (None, self._began)  # by a save before the failure
        meta = {**self._describe(), "gained": gained}
        world, parts = self._spread.world.without(self._group), self._parts()
        # Others may still write beside it.
        aside = self._lease.folder / f"{publish.REPLICA}{min(self._spread.replica)}"
        if world.is_main:
            aside.mkdir()
        more = state_dict.pack(self._live.more) if self._live.more else {}
        held = HeldTensors({**parts.mine, **more})
        writer = SaveWriter(self._lease, world, held, self._keep, aside, self._require_same)
        save = RunningSave(step, snapshot.plain(meta), parts, time.monotonic())
        writer.run(save)
        return f"{type(save.error).__name__}: {save.error}" if save.error else save.reason

    def _require_same(self) -> None:
        """Check that the loop, which may still run, has not changed what was written.

        Raises:
            CheckpointError: it has.
        """
        if self._loose is None or not self._loose.same():
            raise CheckpointError("the script has changed its model meanwhile")
