"""What the ranks of a node and their parent tell each other, in shared memory (memfd_create(2)).

A rank counts its progress there. When a rank of the job has failed, the parent sets the alarm: each
rank that is left tells which step it holds, waits for the verdict of the supervisor, and saves the
step or leaves (train/checkpoint/rescue.py).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp.processes import memory_file

NAME = "HPCDDP_PROGRESS"  # the variable with the descriptor
FILE = "hpcddp-progress"
SIZE = 8  # bytes of a number
# Of a rank; before the first rank is the alarm. A replica is a number of ranks that have the whole
# state together.
FIELDS = ("beats", "phase", "step", "verdict", "replica", "members", "seconds")

# Phases of a rank: no alarm helps it; it could save its step; after the alarm, it waits for the
# verdict, or holds no whole step; it has saved, or could not; it makes no progress, and waits.
BUSY, ARMED, WAITS, UNFIT, SAVED, FAILED, HUNG = range(7)
# Verdicts.
NONE, LEAVE, SAVE = range(3)
PATIENCE = 3600.0  # seconds that a rank waits for its verdict: another one may save first


class Slot:
    """The numbers of one rank.

    Args:
        numbers: the alarm and those of all ranks of the node.
        index: local rank.
        shared: whether a parent reads them.
    """

    def __init__(self, numbers: memoryview, index: int, shared: bool) -> None:
        self._all, self._own, self.shared = numbers, numbers[_at(index) : _at(index + 1)], shared

    @property
    def alarm(self) -> bool:
        """Whether a rank of the job has failed."""
        return bool(self._all[0])

    def count(self, beats: int) -> None:
        """Count progress; 0.1 us."""
        self._own[0] = beats

    def join(self, replica: int, members: int) -> None:
        """Tell which replica this rank belongs to, and the number of its ranks."""
        self._own[4], self._own[5] = replica, members

    def tell(self, phase: int, step: int = 0, seconds: float = 0.0) -> None:
        """Tell the phase of this rank, the step that it holds, and how long it may take to save."""
        self._own[2], self._own[6] = step, math.ceil(seconds)
        self._own[1] = phase

    @property
    def phase(self) -> int:
        """The phase that this rank has told."""
        return int(self._own[1])

    @property
    def verdict(self) -> int:
        """What this rank is to do."""
        return int(self._own[3])


class NodeSlots:
    """The numbers of a node, as the parent sees them.

    Args:
        ranks: of this node.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, size = ranks, SIZE * _at(ranks)
        self.descriptor = memory_file(FILE, inherited=True)  # a rank may replace itself
        os.ftruncate(self.descriptor, size)
        self._all = memoryview(mmap.mmap(self.descriptor, size)).cast("Q")

    @property
    def total(self) -> int:
        """The sum of all counts; it changes with each step of a rank."""
        return sum(self._all[_at(rank)] for rank in range(self.ranks))

    def begin(self) -> None:
        """Clear all numbers, before the ranks of an attempt are forked."""
        for index in range(len(self._all)):
            self._all[index] = 0

    def alarm(self) -> None:
        """Tell the ranks that one of the job has failed."""
        self._all[0] = 1

    def phases(self, ranks: Sequence[int]) -> dict[int, int]:
        """The phases of some global ranks of this node."""
        return {rank: int(self._all[_at(rank % self.ranks) + 1]) for rank in ranks}

    def report(self, ranks: Sequence[int]) -> dict[str, Any]:
        """What global ranks of this node tell after the alarm: see newest_step.py."""
        phases = self.phases(ranks)
        return {
            "waits": {rank: self._held(rank) for rank in ranks if phases[rank] == WAITS},
            "saved": [rank for rank in ranks if phases[rank] == SAVED],
            "busy": sum(phase in (ARMED, HUNG) for phase in phases.values()),
            "divided": self._divided,
        }

    @property
    def _divided(self) -> bool:
        """Whether ranks of other nodes belong to a replica of this one's."""
        joined = [
            (self._all[_at(rank) + 4], self._all[_at(rank) + 5]) for rank in range(self.ranks)
        ]
        here = Counter(replica for replica, members in joined if members)
        return any(members > here[replica] for replica, members in joined)

    def _held(self, rank: int) -> list[int]:
        """The step that a rank holds, its replica, the number of the replica's ranks, and the
        seconds of its save."""
        first = _at(rank % self.ranks)
        return [int(self._all[first + index]) for index in (2, 4, 5, 6)]

    def judge(self, rank: int, verdict: int) -> None:
        """Tell a rank what it is to do."""
        self._all[_at(rank) + 3] = verdict


def own_slot(environ: Mapping[str, str]) -> Slot:
    """The numbers of a rank; in its own memory if it has no parent."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        descriptor, rank = int(environ[NAME]), int(environ["LOCAL_RANK"])
        # The variable may have come to a process without its descriptor.
        file = Path(f"/proc/self/fd/{descriptor}").readlink()
        if str(file).startswith(f"/memfd:{FILE} "):
            numbers = memoryview(mmap.mmap(descriptor, 0)).cast("Q")
            if _at(rank + 1) <= len(numbers):
                return Slot(numbers, rank, shared=True)
    return Slot(memoryview(bytearray(SIZE * _at(1))).cast("Q"), 0, shared=False)


def _at(rank: int) -> int:
    """The index of a rank's first number."""
    return 1 + len(FIELDS) * rank
