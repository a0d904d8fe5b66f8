"""The slowness of each rank over time: the figures of all ranks in few columns."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from hpcddp.observe.curves import Whole, whole_lines
from hpcddp.rundir import AttemptDir, RunDir

COLUMNS = 120  # at most
SAMPLES = 2 * COLUMNS - 10  # lines that are read of a long file
TAIL = 1 << 16  # bytes at the end of a file: each line of them is read


class RankRecord(msgspec.Struct):
    """One line: the figures of each rank, None where a rank has none."""

    step: Whole
    busy_s: list[float | None] = []
    wait_s: list[float | None] = []
    step_s: list[float | None] = []
    samples_per_s: list[float | None] = []
    memory: list[float | None] = []
    gpu: list[float | None] = []


_DECODER = msgspec.json.Decoder(RankRecord)


class Heat:
    """The slowness of each rank over time, in few columns, and the newest figures of each.

    Of a long file only some lines are read: a million lines take no longer than a thousand.
    """

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.newest = RankRecord(0)
        self.steps: list[int] = []
        self.behind = False  # whether the time was too short to read all
        self._columns: list[list[float | None]] = []
        self._apart = 1  # steps between two columns, at least
        self._read: dict[int, int] = {}  # attempt -> bytes
        self._done: set[int] = set()  # attempts that have ended

    def update(self, seconds: float = math.inf) -> None:
        """Read new lines.

        Args:
            seconds: for reading; the next call reads the rest.
        """
        until = time.monotonic() + seconds
        folders = [f for f in self.run.all_attempts() if f.number not in self._done]
        new = {f.number: _size(f.ranks) - self._read.get(f.number, 0) for f in folders}
        whole = sum(new.values()) or 1
        for i, folder in enumerate(folders):
            self.behind = i > 0 and time.monotonic() > until
            if self.behind:
                return
            if new[folder.number] > 0:
                self._file(folder, max(1, SAMPLES * new[folder.number] // whole))
            if folder is not folders[-1]:
                self._done.add(folder.number)

    def _file(self, folder: AttemptDir, samples: int) -> None:
        """Read the new part of a file: a sample of its lines, and all of the last ones."""
        start = self._read.get(folder.number, 0)
        with contextlib.suppress(OSError), folder.ranks.open("rb") as f:
            f.seek(start)
            tail = max(TAIL, 4 * len(f.readline()))
            end = _size(folder.ranks) - tail
            if end - start > tail:
                for i in range(samples):
                    self._take(_line(f, start, start + (end - start) * i // samples))
                line = _line(f, start, end)
                self._take(line)
                start = f.tell() if line.endswith(b"\n") else start
        for data in whole_lines(folder.ranks, start):
            start += len(data)
            for text in data.splitlines():
                self._take(text)
        self._read[folder.number] = start

    def _take(self, text: bytes) -> None:
        try:
            record = _DECODER.decode(text)
        except msgspec.MsgspecError:
            return
        self.newest, step = record, record.step
        while self.steps and self.steps[-1] >= step:  # the step is repeated
            del self.steps[-1], self._columns[-1]
        if self.steps and step < self.steps[-1] + self._apart:
            return
        self.steps.append(step)
        self._columns.append(_ratios(record))
        while len(self.steps) > COLUMNS:
            self._apart *= 2
            self._widen()

    def _widen(self) -> None:
        """Drop the columns that are too near to the one before them."""
        kept = [0]
        for i, step in enumerate(self.steps):
            if step >= self.steps[kept[-1]] + self._apart:
                kept.append(i)
        self.steps = [self.steps[i] for i in kept]
        self._columns = [self._columns[i] for i in kept]

    def rows(self) -> list[list[float | None]]:
        """By rank, for each of ``steps``; None where a rank has no figure."""
        size = max(map(len, self._columns), default=0)
        return [[c[r] if r < len(c) else None for c in self._columns] for r in range(size)]


def _ratios(record: RankRecord) -> list[float | None]:
    """Each rank's own work and wait, as a multiple of the median of all."""
    own = [
        None if b is None and w is None else (b or 0.0) + (w or 0.0)
        for b, w in itertools.zip_longest(record.busy_s, record.wait_s)
    ]
    known = [value for value in own if value is not None]
    middle = statistics.median(known) if known else 0.0
    return [None if value is None or not middle else round(value / middle, 2) for value in own]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _line(f: BinaryIO, start: int, offset: int) -> bytes:
    """The first whole line from an offset on; lines begin at ``start``."""
    f.seek(offset)
    if offset > start:
        f.readline()
    return f.readline()
