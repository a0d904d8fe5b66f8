"""Rehearsal: which faults there are, and the instants at which they come."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from hpcddp.errors import UserError

T = TypeVar("T")

# Kind -> whether it leaves no time to save, and so may cost the steps since the last checkpoint.
KINDS = {
    "preempt": False,
    "kill-node": True,
    "timeout": False,
    "crash": True,
    "hang": True,
    "cancel": False,
}
ROOM = 0.4  # seconds of training between two faults: a stop is agreed within a quarter of a second
LATEST = 0.95  # of the steps: a later fault may come after the run's end
EARLY = 3.0  # seconds before a time limit at which a run that was held goes on: it still can save


@dataclass(frozen=True)
class Timeline:
    """How an undisturbed run went."""

    startup: float  # seconds from the begin of its attempt to its first step
    per_step: float  # seconds
    steps: int
    clock: bool = False  # its program tells no steps, and these are ticks of a clock

    @property
    def seconds(self) -> float:
        return self.startup + self.per_step * self.steps


@dataclass
class Fault:
    """One fault, and its effect."""

    kind: str
    step: int  # at which it is to come; 0 for a start-up
    after: float  # seconds after the attempt began, for one in a start-up
    aim: float  # which rank or node: a share of them, from 0 to 1
    attempt: int = 0  # that it hit; 0 before
    at: int = 0  # the step at which it came
    when: float = 0.0  # seconds since the epoch
    failed: str = ""  # why the run did not survive it

    def pick(self, targets: Sequence[T]) -> T:
        """The one that it hits."""
        return targets[int(self.aim * len(targets))]


def draw(counts: Mapping[str, int], seed: int, timeline: Timeline) -> list[Fault]:
    """The faults in their order: instants uniform over an undisturbed run, start-up included.

    Each leaves those after it some room: a run that has ended cannot be disturbed. A time limit
    leaves a step at least.

    Raises:
        UserError: the run is too short for so many.
    """
    random = Random(seed)
    drawn = sorted(
        (random.random(), random.random(), kind)
        for kind in KINDS
        for _ in range(counts.get(kind, 0))
    )
    room = 1 + math.ceil(ROOM / timeline.per_step)
    last = int(LATEST * timeline.steps)
    if last < room * len(drawn):
        raise UserError(
            f"{timeline.steps} steps in {timeline.per_step * timeline.steps:.1f} s are too few for "
            f"{len(drawn)} faults",
            hint=f"let it take {math.ceil(room * len(drawn) / LATEST)} steps or more, "
            "with --set epochs=N or max_steps=N",
        )
    faults = []
    for left, (share, aim, kind) in zip(range(len(drawn) - 1, -1, -1), drawn, strict=True):
        after = share * timeline.seconds
        step = math.ceil((after - timeline.startup) / timeline.per_step)
        if step > 0 or kind == "timeout":
            faults.append(Fault(kind, max(1, min(step, last - room * left)), 0.0, aim))
        else:
            faults.append(Fault(kind, 0, after, aim))
    return faults


def limit(before: int, fault: Fault, timeline: Timeline) -> float:
    """The time limit of an attempt that goes on after a step, in seconds. It is long enough for the
    step at which the limit is to come; the run is held there for the rest."""
    return 2 * timeline.startup + 1.5 * (fault.step - before) * timeline.per_step + 2 * EARLY
