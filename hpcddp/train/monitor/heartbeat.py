"""A rank's heartbeat: the training counts, the watchdog and the rank's parent read (no torch)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from hpcddp.attempt.link import slots
from hpcddp.attempt.link.slots import Slot

LOOK = 0.05  # seconds between two looks at the verdict


class Heartbeat:
    """Counters that only the training thread writes; a beat costs 0.1 us."""

    def __init__(self) -> None:
        self.slot = slots.own_slot(os.environ)  # where its parent reads
        self.step = 0  # the newest optimizer step of the run
        self.taken = 0  # optimizer steps in this process
        self.beats = 0  # grows with any progress
        self.patient = 0  # more than 0 within `patience`

    def beat(self, step: int) -> None:
        """Count an optimizer step."""
        self.step = step
        self.taken += 1
        self.touch()

    def touch(self) -> None:
        """Count other progress, such as a batch of an evaluation."""
        self.beats += 1
        self.slot.count(self.beats)

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """Allow the work within to take as long as a start."""
        self.patient += 1
        self.touch()
        try:
            yield
        finally:
            self.patient -= 1
            self.touch()


def outlast(slot: Slot) -> None:
    """In a hang, before this process ends: call the others to the alarm, and wait as long as this
    rank may have to save."""
    if slot.shared and slot.phase == slots.ARMED:
        slot.tell(slots.HUNG)
    until = time.monotonic() + slots.PATIENCE
    while slot.phase in (slots.HUNG, slots.WAITS, slots.SAVED) and slot.verdict != slots.LEAVE:
        if slot.verdict == slots.NONE and time.monotonic() > until:
            return
        time.sleep(LOOK)
