"""Saves the step that this rank holds, when another rank has failed.

With ``ddp``, each rank has the whole state: between two optimizer steps, and through the next
forward and backward pass until the optimizer's step. So a rank whose peer is gone still has the
newest step. It tells the supervisor which step that is (attempt/link/slots.py). The supervisor
chooses one rank, which writes an ordinary checkpoint, without the others, and all leave. With
``hsdp`` and other products with ``ddp``, the ranks of one replica have the whole state together:
they write it over a group of their own.

A thread does this, as the loop may be anywhere: in a collective that waits for a lost rank, in an
evaluation, in a script that catches the error. It shuts down the connections of this rank, which
ends the collective, and lets the loop change nothing any more. Then it ends the process, also where
no rank can save.

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

import torch.distributed as dist

from hpcddp.attempt import exit_codes
from hpcddp.attempt.error_record import of_a_peer
from hpcddp.attempt.link import slots
from hpcddp.attempt.link.slots import Slot
from hpcddp.train.checkpoint import publish
from hpcddp.train.checkpoint.device_steps import StepMark
from hpcddp.train.checkpoint.held_step import Describe, HeldStep, Suspect, can_hold
from hpcddp.train.checkpoint.host_copy import HeldTensors
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.save_writer import RunningSave, SaveWriter
from hpcddp.train.checkpoint.saver import Saver
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.rank import connections
from hpcddp.train.rank.spread import Spread

LOOK = 0.2  # seconds between two looks at the alarm
SOON = 0.01  # the same once it is expected, or has been given
MOMENT = 0.5  # seconds to wait for the alarm at the end of a script
TURN = 5.0  # seconds for the loop to complete a step that is being taken
AHEAD = 0.5  # the same if the device goes on by itself, and Python may wait for it
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

    ``able``: this rank may be called to save. ``levelled``: all ranks have the same buffers when
    the weights begin to change. ``suspect`` tells whether a loss of this rank until a step is bad.
    """

    def __init__(
        self, slot: Slot, lease: Lease, spread: Spread, live: Live, saver: Saver, keep: int,
        touch: Callable[[], object],
    ) -> None:  # fmt: skip
        self._slot, self._lease, self._spread, self._live = slot, lease, spread, live
        self._saver, self._keep, self._touch = saver, keep, touch
        self.able, self.levelled = False, True
        self.suspect: Suspect = lambda step, number: False
        self._group: dist.ProcessGroup | None = None  # of the replica, if it is not this rank
        self._kept = set[int]()  # the sockets of that group
        self._held: HeldStep | None = None  # also None once the script has changed its model
        self._has_buffers = False
        self._began = 0  # the step at which this attempt has begun
        self._turn = threading.Lock()  # of the loop, while it takes a step, or of the thread
        self._changing = self._lost = False  # the loop has it; it has lost another rank
        self._called, self._over = threading.Event(), threading.Event()
        self._begun, self._done = threading.Event(), threading.Event()

    def begin(self, at: Position, describe: Describe, *, leaves: bool) -> None:
        """Be ready from now on: to save, if this rank can, or else, if it ``leaves``, to do that;
        a collective. ``describe`` makes the meta.json of a checkpoint of the newest marked step.
        """
        self.able = self._meet(describe)
        if self.able:
            self._has_buffers = self._held is not None and self._held.has_buffers
            self.restart(at)
            self._slot.join(min(self._spread.replica), len(self._spread.replica))
            self._slot.tell(slots.ARMED)
        else:
            self._held = None
        if self._slot.shared and (self.able or leaves):
            threading.Thread(target=self._stand_by, name="hpcddp alarm", daemon=True).start()

    def restart(self, at: Position) -> None:
        """Note the step from which the training continues: it is on disk."""
        self._began = at.step
        self.mark(at)

    def _meet(self, describe: Describe) -> bool:
        """Whether all ranks are able; then make the groups of replicas of several ranks."""
        world, replica = self._spread.world, self._spread.replica
        everyone = world.gather((self._prepare(describe), replica))
        able = all(able for able, _ in everyone)
        if able and len(replica) > 1:
            before = connections.sockets()
            for ranks in sorted({tuple(ranks) for _, ranks in everyone}):
                group = dist.new_group(list(ranks), backend="gloo")
                self._group = group if world.rank.world_rank in ranks else self._group
            world.barrier()  # until all are connected
            self._kept = connections.sockets() - before
        return able

    def _prepare(self, describe: Describe) -> bool:
        """Whether this rank can hold a step."""
        able = self._slot.shared and can_hold(self._live, self._spread.world.device)
        with contextlib.suppress(Exception):  # see HeldStep
            self._held = None
            if able and self._spread.replica:
                self._held = HeldStep(self._live, self._spread, describe)
        return self._held is not None

    def close(self) -> None:
        """End the thread, unless another rank has failed: this one has nothing more to save."""
        if not (self._begun.is_set() or self._lost):
            self.able = False
            self._over.set()
            self._slot.tell(slots.UNFIT)
            self._called.set()
            self._done.set()

    @property
    def levels(self) -> bool:
        """Whether the ranks must have the same buffers before the optimizer's step: any of them may
        have to save what rank 0 has. DDP gives them rank 0's only in the next forward pass."""
        return self.able and self._has_buffers

    def tie(self, share_buffers: Callable[[], object], *, tied: bool) -> None:
        """Let all ranks of a replica take the optimizer's step, or none: one stage of a pipeline
        has its gradients before another. A collective; ``tied`` if a later one ties them too."""
        if self.levels:
            share_buffers()
        if self._group and not tied:
            self._spread.tie()

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
        if self._held:
            self._held.change()

    def mark(self, at: Position) -> None:
        """Note that a step is complete, and keep what the next forward pass changes."""
        try:
            if self._held:
                self._held.mark(at.step)
        except Exception:  # the script has changed the model: it trains on as it is
            self._held = None
        if self._changing:
            self._changing = False
            self._turn.release()

    def renew(self, at: Position) -> None:
        """Note the same step again, after an evaluation of it: on a GPU, its mark has the meta."""
        self.change()
        self.mark(at)

    def fail(self, error: BaseException) -> None:
        """After a failure of the loop: if this rank has only lost another one, wait until its step
        is saved or not needed. What a rank holds that has failed by itself is not used."""
        if self._changing:
            self._changing = False
            if self._held:
                self._held.forget()
            self._turn.release()
        self._lost = self._begun.is_set() or of_a_peer(error)
        if not self._lost:
            self.close()
        elif self.able:
            self._called.set()
            self._wait()

    def _wait(self) -> None:
        """Wait until the step is saved or not needed."""
        while not self._done.wait(TOUCH):
            self._touch()

    def leave(self) -> None:
        """At the end of a script, which may have caught the error: wait a moment for the alarm."""
        until = time.monotonic() + MOMENT
        while self.able and not self._slot.alarm and time.monotonic() < until:
            time.sleep(SOON)
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
            if self.able:
                connections.shut(self._kept)
            self._answer()
        except Exception as failed:  # such as one for want of descriptors
            print(f"hpcddp: the newest step is not saved: {failed}", file=sys.stderr, flush=True)
            self._slot.tell(slots.UNFIT)
        finally:
            self._done.set()
        # On a GPU, the loop may wait for ever.
        time.sleep(0.0 if self._held and self._held.ahead else LEAVE)
        os._exit(exit_codes.FAILED)

    def _answer(self) -> None:
        """Tell which step this rank holds, and save it if that is the verdict."""
        mark, held = self._whole(), self._held
        if not (mark and held):
            self._slot.tell(slots.UNFIT)
            return
        self._slot.tell(slots.WAITS, mark.step, self._seconds)
        if self._verdict(slots.NONE) != slots.SAVE:
            return
        self._saver.close()  # it has lost a rank too
        try:
            reason = self._write(held, mark)
        except Exception as failed:
            reason = f"{type(failed).__name__}: {failed}"
        replica = self._spread.replica
        if self._spread.world.rank.world_rank == min(replica):
            who = f"rank{'s' * (len(replica) > 1)} {', '.join(map(str, replica))}"
            what = f"not saved: {reason}" if reason else f"saved by {who}"
            text = f"hpcddp: after the loss of a rank: step {mark.step} {what}"
            print(text, file=sys.stderr, flush=True)
        self._slot.tell(slots.FAILED if reason else slots.SAVED, mark.step)
        self._verdict(slots.SAVE)

    def _whole(self) -> StepMark | None:
        """The newest step that this rank has whole. What a script saves besides its model, rank 0
        has, and the right buffers, if those of the ranks differ."""
        ahead = self._held is not None and self._held.ahead
        turn, held = self._turn.acquire(timeout=AHEAD if ahead else TURN), self._held
        if held is None or not (turn or held.ahead):
            return None
        mark = held.newest(self.suspect)
        same = self.levelled and mark is not None and mark.level
        only_of_rank_0 = self._live.more or (held.has_buffers and not same)
        return None if only_of_rank_0 and 0 not in self._spread.replica else mark

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
        until = time.monotonic() + slots.PATIENCE
        while self._slot.verdict == known and time.monotonic() < until:
            time.sleep(SOON)
        return self._slot.verdict

    def _write(self, held: HeldStep, mark: StepMark) -> str:
        """Write a checkpoint without the other replicas; the reason if that fails."""
        if mark.step in (self._saver.saved, self._began):
            return ""
        parts, tensors, meta = held.content(mark)
        meta["gained"] = self._saver.saved not in (None, self._began)  # by a save before
        world = self._spread.world.without(self._group)
        # Others may still write beside it.
        aside = self._lease.folder / f"{publish.REPLICA}{min(self._spread.replica)}"
        if world.is_main:
            aside.mkdir()
        how = self._keep, aside, held.require_same
        writer = SaveWriter(self._lease, world, HeldTensors(tensors), *how)
        writer.passed = set(self._saver.passed)
        save = RunningSave(mark.step, meta, parts, time.monotonic())
        writer.run(save)
        return f"{type(save.error).__name__}: {save.error}" if save.error else save.reason
