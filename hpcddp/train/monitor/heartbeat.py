"""A rank's signs of life: given by the training, read by the watchdog (no torch)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Heartbeat:
    """Counters that the training thread alone writes; a beat costs a tenth of a microsecond."""

    def __init__(self) -> None:
        self.step = 0  # the newest optimizer step of the run
        self.taken = 0  # optimizer steps in this process
        self.beats = 0  # signs of life
        self.patient = 0  # more than 0 within `patience`

    def beat(self, step: int) -> None:
        """An optimizer step was taken."""
        self.step = step
        self.taken += 1
        self.beats += 1

    def touch(self) -> None:
        """Something else went on, such as a batch of an evaluation."""
        self.beats += 1

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """The work within may take as long as a start."""
        self.patient += 1
        self.beats += 1
        try:
            yield
        finally:
            self.patient -= 1
            self.beats += 1
