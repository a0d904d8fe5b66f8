"""Rehearsal: the kinds of faults, and their times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from hpcddp.errors import UserError
from hpcddp.sizes import counted

T = TypeVar("T")

# Kind -> whether it leaves no time to save: then it may cost the steps since the last checkpoint.
KINDS = {
    "preempt": False,
    "kill-node": True,
    "timeout": False,
    "crash": True,
    "hang": True,
    "cancel": False,
    "silent-node": True,
    "kill-script": True,
    "kill-head": True,
}
LOST = ("kill-node", "silent-node")  # kinds that lose a node
SECOND = 3.0  # seconds after a fault within which the second one comes
ROOM = 0.4  # seconds of training between two faults: a stop is agreed within a quarter of a second
DOWN = (20, 60)  # seconds until Slurm has a lost node down, soon or late
LATE = 1.25 * DOWN[1]  # seconds of training until it has, late: Slurm asks a node now and then
LATEST = 0.95  # of the steps: a later fault may come after the run's end
EARLY = 3.0  # seconds before a time limit at which a paused run continues: it can still save


@dataclass(frozen=True)
class Timeline:
    """The times of a run without faults."""

    startup: float  # seconds from the start of its attempt to its first step
    per_step: float  # seconds
    steps: int
    clock: bool = False  # its program reports no steps: these are ticks of a clock

    @property
    def seconds(self) -> float:
        return self.startup + self.per_step * self.steps


@dataclass
class Fault:
    """One fault, and its effect."""

    kind: str
    step: int  # planned; 0 for one during the start of an attempt
    after: float  # seconds after the start of the attempt, for one during the start
    aim: float  # its rank or node: a share of them, from 0 to 1
    second: float | None = None  # seconds after it until a rank is killed as well
    second_attempt: int = 0  # the one that this hit; 0 before
    down: bool = False  # its node returns only when Slurm has marked it as down
    attempt: int = 0  # that it hit; 0 before
    node: str = ""  # that it lost
    at: int = 0  # its real step
    when: float = 0.0  # seconds since the epoch
    failed: str = ""  # the reason why the run did not survive it

    def pick(self, targets: Sequence[T]) -> T:
        """The target that it hits."""
        return targets[int(self.aim * len(targets))]


def draw(
    counts: Mapping[str, int], seed: int, timeline: Timeline, *, two: int = 0, down: int = 0
) -> list[Fault]:
    """The faults in their order. Their times are uniform over a run without faults, from its start.

    Each fault leaves steps for those after it. A time limit leaves at least one step before it.

    Args:
        two: the number of those with a second fault while the first one is handled.
        down: the number of lost nodes that return only when Slurm has marked them as down.

    Raises:
        UserError: the run is too short for the number of faults.
    """
    random = Random(seed)
    drawn = sorted(
        (random.random(), random.random(), kind)
        for kind in KINDS
        for _ in range(counts.get(kind, 0))
    )
    faults = [_at(share * timeline.seconds, aim, kind, timeline) for share, aim, kind in drawn]
    for fault in random.sample(faults, min(two, len(faults))):
        fault.second = SECOND * random.random()
    for fault in random.sample([fault for fault in faults if fault.kind in LOST], down):
        fault.down = True
    rooms = [1 + math.ceil((LATE if f.down else ROOM) / timeline.per_step) for f in faults]
    spare = int(LATEST * timeline.steps) - sum(rooms)
    if spare < 0:
        raise _too_short(timeline, len(drawn), math.ceil(sum(rooms) / LATEST))
    before = 1
    for fault, room in zip(faults, rooms, strict=True):
        if fault.step:
            fault.step = before + int((fault.step - 1) / timeline.steps * spare)
            before += room
    return faults


def _at(after: float, aim: float, kind: str, timeline: Timeline) -> Fault:
    """A fault some seconds after the start of a run without faults."""
    step = math.ceil((after - timeline.startup) / timeline.per_step)
    if step > 0 or kind == "timeout":
        return Fault(kind, max(1, step), 0.0, aim)
    return Fault(kind, 0, after, aim)


def _too_short(timeline: Timeline, faults: int, least: int) -> UserError:
    """The error for a run with fewer steps than its faults need."""
    number = counted(faults, "fault")
    if timeline.clock:
        return UserError(
            f"a run of {timeline.seconds:.1f} s is too short for {number}",
            hint=f"use a program that runs for at least {least * timeline.per_step:.0f} s",
        )
    steps = f"{counted(timeline.steps, 'step')} in {timeline.per_step * timeline.steps:.1f} s"
    return UserError(
        f"{steps} are too few for {number}",
        hint=f"use at least {least} steps, with --set epochs=N or --set max_steps=N",
    )


def limit(before: int, fault: Fault, timeline: Timeline) -> float:
    """The time limit, in seconds, of an attempt that continues after a step.

    It is long enough for the step of the fault; the run is paused there for the rest.
    """
    return 2 * timeline.startup + 1.5 * (fault.step - before) * timeline.per_step + 2 * EARLY
