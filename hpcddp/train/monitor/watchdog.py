"""A thread that detects when the training hangs.

A rank that waits forever raises no error: one stopped rank leaves all others in a collective. So
each rank's watchdog counts the seconds since the last heartbeat (heartbeat.py). At the limit it
collects evidence from the node's ranks (hang_report.py) and ends the process.

The limit is ``train.hang_seconds`` or ten times the longest time between two heartbeats so far,
whichever is longer. A start (until two steps, so that one has been timed), a save and the start of
an evaluation may take six times as long: half an hour by default. With a watchdog, the time-outs of
torch's own groups are lifted (World.connect).
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from hpcddp.rundir import AttemptDir
from hpcddp.train.monitor.hang_report import Evidence
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.rank.world import World

SLOWEST = 10  # times the longest time between two heartbeats
PATIENCE = 6  # times the limit, for a start, a save, an evaluation's start
LOOKS = 20  # checks within the shortest limit
LONGEST_LOOK = 1.0  # seconds between two checks
GATHER = 20.0  # seconds after which a rank ends without evidence: the disk itself may hang


class Watchdog:
    """Watches a heartbeat.

    Args:
        floor: shortest limit, in seconds.
        leave: ends the process; called in the watchdog's thread.
    """

    def __init__(
        self, heartbeat: Heartbeat, evidence: Evidence, floor: float, leave: Callable[[], object]
    ) -> None:
        self._heartbeat, self._evidence, self._leave = heartbeat, evidence, leave
        self._floor = floor
        self._look = min(LONGEST_LOOK, floor / LOOKS)
        self._slowest = 0.0
        self._over = threading.Event()
        self._doubt = threading.Event()  # half of the limit has passed
        self._called = False  # another rank has detected the hang
        self._thread = threading.Thread(target=self._watch, name="hpcddp watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join(GATHER)

    @property
    def limit(self) -> float:
        """Seconds without a heartbeat that count as a hang now."""
        limit = max(self._floor, SLOWEST * self._slowest)
        return limit * PATIENCE if self._patient else limit

    @property
    def _patient(self) -> bool:
        return self._heartbeat.taken < 2 or self._heartbeat.patient > 0

    def _watch(self) -> None:
        """Count only time in which this thread ran: a suspended job does not hang, and a machine
        too busy for this thread is too busy for the training."""
        clock, silent = time.monotonic(), 0.0
        beats, timed = self._heartbeat.beats, False
        while not self._over.wait(self._look):
            now = time.monotonic()
            silent += min(now - clock, 2 * self._look)
            clock = now
            limit = self.limit  # before the beats: a long phase may end in between
            if self._heartbeat.beats != beats:
                if timed:
                    self._slowest = max(self._slowest, silent)
                beats, silent = self._heartbeat.beats, 0.0
                timed = self._heartbeat.taken > 0 and not self._heartbeat.patient
                self._doubt.clear()
            elif silent > limit or self._called:
                self._hung(silent)
                return
            elif silent > limit / 2 and not self._doubt.is_set():
                self._doubt.set()
                threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Check for a hang on another rank, in a thread: the file system itself may hang."""
        while self._doubt.is_set() and not self._over.wait(self._look):
            if self._evidence.begun:
                self._called = self._doubt.is_set()
                return

    def _hung(self, silent: float) -> None:
        """Report the hang, and end the process within a limited time, whatever hangs."""
        work = threading.Thread(
            target=self._evidence.gather, args=(self._heartbeat.step, silent), daemon=True
        )
        work.start()
        work.join(GATHER)
        self._leave()


@contextlib.contextmanager
def watching(
    heartbeat: Heartbeat,
    world: World,
    attempt: AttemptDir,
    floor: float,
    leave: Callable[[], object] | None,
) -> Iterator[None]:
    """Watch for hangs within; do nothing without a limit or ``leave``."""
    if not floor or leave is None:
        yield
        return
    evidence = Evidence(world, attempt)
    try:
        evidence.open()
    except OSError as error:
        print(f"hpcddp: cannot record stacks if a rank hangs: {error}", file=sys.stderr, flush=True)
    watchdog = Watchdog(heartbeat, evidence, floor, leave)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()
        evidence.close()
