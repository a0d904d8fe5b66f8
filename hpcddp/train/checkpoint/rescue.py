"""Saves the step that this rank holds, when another rank has failed.

With ``ddp``, each rank has the whole state: between two optimizer steps, and through the next
forward and backward pass until the optimizer's step. So a rank whose peer is gone still has the
newest step. It tells the supervisor which step that is (attempt/link/slots.py). The supervisor
chooses one rank, which writes an ordinary checkpoint, without the others, and all leave.

A rank that waits in a collective for a lost one may not notice: gloo tells only the neighbours. A
thread waits for the alarm, and shuts down the connections of this rank, which ends the collective.

The next forward pass changes the buffers: they are copied after each step. Random numbers follow
from seed, rank and step, the schedule and the position from the step.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcddp.attempt.error_record import kind_of
from hpcddp.attempt.link import slots
from hpcddp.attempt.link.slots import Slot
from hpcddp.train.checkpoint import snapshot
from hpcddp.train.checkpoint.host_copy import HostCopies
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.save_writer import RunningSave, SaveWriter
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank.spread import Spread

LOOK = 0.05  # seconds between two looks at the alarm
PATIENCE = 20.0  # seconds to wait for the alarm and the verdict


class Rescue:
    """One rank's part in saving at a failure.

    Args:
        slot: where the parent of this rank reads and writes; None for a loop that cannot save
            alone.
        keep: number of checkpoints to keep, the newest.
    """

    def __init__(
        self, slot: Slot | None, lease: Lease, spread: Spread, live: Live, keep: int
    ) -> None:
        self._slot = slot or slots.own_slot({})
        self._lease, self._spread, self._live, self._keep = lease, spread, live, keep
        layout, world = spread.layout, spread.world
        whole = layout.plain and not layout.zero and not live.files
        memory = live.hook is not None and live.hook.fits is not None
        self.able = self._slot.shared and whole and not memory and world.size > 1
        self.able = self.able and world.device.type == "cpu"
        self._loose: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._held: int | None = None  # the newest step that this rank has whole
        self._began = 0  # the step at which this attempt has begun
        self._over = threading.Event()

    def begin(self, at: Position) -> None:
        """Be ready from now on, if this rank can save alone."""
        if not self.able:
            return
        parts = state_dict.parts(self._live.module, self._live.optimizer)
        self._loose, self._began = parts.loose, at.step
        self._copies = {name: tensor.clone() for name, tensor in parts.loose.items()}
        self.mark(at)
        self._slot.tell(slots.ARMED)
        threading.Thread(target=self._await_alarm, name="hpcddp alarm", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._over.set()

    @property
    def levels(self) -> bool:
        """Whether the ranks must have the same buffers before the optimizer's step: any of them may
        have to save what rank 0 has. DDP gives them rank 0's only in the next forward pass."""
        return self.able and bool(self._copies)

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Within, the optimizer changes the weights: a failure leaves no whole step."""
        held, self._held = self._held, None
        yield
        self._held = held

    @torch.no_grad()
    def mark(self, at: Position) -> None:
        """Note that a step is complete, and keep what the next forward pass changes."""
        if self._copies:
            torch._foreach_copy_([*self._copies.values()], [*self._loose.values()])
        self._held = at.step

    def save(
        self, error: BaseException, at: Position, facts: dict[str, Any], saved: int | None
    ) -> None:
        """After a failure of this rank: if it has only lost another one, wait for the verdict, and
        save the step if this rank is to.

        Args:
            facts: further plain data for meta.json.
            saved: the newest step on disk.
        """
        if not self.able or kind_of(error, stepped=True) != "peer":
            return
        fit = self._held == at.step
        self._slot.tell(slots.WAITS if fit else slots.UNFIT, at.step)
        until = time.monotonic() + PATIENCE
        while not self._slot.verdict and time.monotonic() < until:
            time.sleep(LOOK / 5)
        if not fit or self._slot.verdict != slots.SAVE:
            return
        try:
            gained = {"gained": saved not in (None, self._began)}  # by a save before the failure
            known = at.step in (saved, self._began)
            reason = "" if known else self._write(at, {**facts, **gained})
        except Exception as failed:
            reason = f"{type(failed).__name__}: {failed}"
        what = f"not saved: {reason}" if reason else f"saved by rank {self._number}"
        print(
            f"hpcddp: after the loss of a rank: step {at.step} {what}", file=sys.stderr, flush=True
        )
        self._slot.tell(slots.FAILED if reason else slots.SAVED, at.step)

    @property
    def _number(self) -> int:
        return self._spread.world.rank.world_rank

    def _write(self, at: Position, facts: dict[str, Any]) -> str:
        """Write a checkpoint without the other ranks; the reason if that fails."""
        alone = self._spread.world.alone()
        parts = state_dict.parts(self._live.module, self._live.optimizer)
        meta = snapshot.meta(self._lease, self._spread, self._live, at, facts)
        meta = json.loads(json.dumps(meta, default=Tensor.tolist))
        copies = HostCopies(alone.device)
        copies.take({**parts.stepped, **self._copies}, {})
        save = RunningSave(at.step, meta, parts, time.monotonic())
        writer = SaveWriter(self._lease, alone, copies, self._keep)
        writer.run(save)
        if save.error:
            return f"{type(save.error).__name__}: {save.error}"
        return save.reason

    def _await_alarm(self) -> None:
        """Wait for the alarm, and end the collective in which this rank waits."""
        while not self._over.wait(LOOK):
            if self._slot.alarm:
                _shut_connections()
                return


def outlast(slot: Slot) -> None:
    """In a hang, before this process ends: call the others to the alarm, and wait as long as this
    rank may have to save."""
    if slot.shared and slot.phase == slots.ARMED:
        slot.tell(slots.HUNG)
    until = time.monotonic() + PATIENCE
    while slot.phase in (slots.HUNG, slots.WAITS) and slot.verdict != slots.LEAVE:
        if slot.verdict == slots.NONE and time.monotonic() > until:
            return
        time.sleep(LOOK)


def _shut_connections() -> None:
    """Shut down the TCP connections of this process to other ranks: all but those of files."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.getpeername()  # fails for one that listens: gloo would abort the process
                    sock.shutdown(socket.SHUT_RDWR)
