"""The metrics of a run over all of its attempts. Each line is read once, each step counted once.

A later attempt, which resumed from a checkpoint, may repeat steps: its records replace the earlier
ones of these steps. So do the records after a rollback.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate, chain
from operator import attrgetter, mul, sub
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hpcddp.observe.series import Series
from hpcddp.rundir import RunDir, parse_lines

CHUNK = 1 << 22  # bytes that are decoded at once
KEPT = 10_000  # records that are no points of a curve; older ones are dropped
RECENT = 200  # newest points, with their times
NAMES = ("loss", "lr", "samples_per_s", "step_s", "wait_s", "grad_norm")
EVENT = attrgetter("event")
TRAIN = {name: attrgetter(name) for name in NAMES}  # the curves that a record of a step may have
LASTING = ("ranks", "start", "slow", "recovered")  # records that hold until another replaces them
STEPS = {"train", "step"}  # events of steps: a loop without a loss writes the second
POINTS = ("eval", "log")  # events whose metrics are curves


Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]  # a count


class _Line(msgspec.Struct, gc=False):
    """The fields of a line that make the curves; the others are ignored."""

    event: str = ""
    step: Whole = 0
    time: float = 0.0
    loss: float | None = None
    lr: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    wait_s: float | None = None
    grad_norm: float | None = None


class _Other(msgspec.Struct):
    """The fields of a record that is no point. A record with other types is ignored."""

    event: str = ""
    time: float | None = None
    step: Whole | None = None
    to: Whole | None = None
    epoch: Whole | None = None
    total_steps: Whole | None = None
    steps_per_epoch: Whole | None = None
    global_batch: Whole | None = None
    rank: Whole | None = None
    ranks: list[Any] | None = None
    metrics: dict[str, Any] | None = None
    hint: str | None = None


_DECODER = msgspec.json.Decoder(_Line)


class Curves:
    """The metrics that a run has written so far.

    Args:
        brief: curves of which a few points are enough, the newest among them.
    """

    def __init__(self, run: RunDir, brief: Collection[str] = ()) -> None:
        self.run, self._brief = run, brief
        self.series: dict[str, Series] = {}
        self.events: list[dict[str, Any]] = []  # all other records, oldest first
        self.spent = Series()  # seconds of all steps up to a step, where records have them
        self.step = 0  # the newest in a record
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)  # step, time of its record
        self.behind = False  # whether the time was too short to read all
        self._counted = 0  # the last step in ``spent``
        self._read: dict[int, int] = {}  # attempt -> bytes
        self._done: set[int] = set()  # attempts that have ended

    def update(self, seconds: float = math.inf) -> bool:
        """Read the new lines; whether there were any.

        Args:
            seconds: for reading; the next call reads the rest.
        """
        new, until = False, time.monotonic() + seconds
        self.behind = False
        folders = [f for f in self.run.all_attempts() if f.number not in self._done]
        for attempt in folders:
            for data in whole_lines(attempt.metrics, self._read.get(attempt.number, 0)):
                self._read[attempt.number] = self._read.get(attempt.number, 0) + len(data)
                self._take(data, attempt.number)
                new = True
                if time.monotonic() > until:
                    self.behind = True
                    return new
            if attempt is not folders[-1]:
                self._done.add(attempt.number)
        return new

    def _take(self, data: bytes, attempt: int) -> None:
        """Add consecutive points in one go, and other records one by one."""
        records, first = _decoded(data), 0
        events = set(map(EVENT, records))
        lines = [] if events and events <= STEPS else data.split(b"\n")
        if lines and len(records) != len(lines) - 1:  # a line that is no record counts too
            records = [_one(line) for line in lines[:-1]]
        for i, record in enumerate(records):
            if record.event not in STEPS:
                self._points(records[first:i])
                self._other({**_parsed(lines[i]), "attempt": attempt})
                first = i + 1
        self._points(records[first:])

    def _points(self, records: list[_Line]) -> None:
        if not records:
            return
        all_steps = array("q", [r.step for r in records])
        for name, get in TRAIN.items():
            taken, steps = records, all_steps
            if name in self._brief:
                taken, steps = records[-1:], all_steps[-1:]
            values = list(map(get, taken))
            if None not in values:
                self.of(name).add(steps, values)
            elif filled := [i for i, value in enumerate(values) if value is not None]:
                self.of(name).add([steps[i] for i in filled], [values[i] for i in filled])
        self._count(all_steps, [r.step_s or 0.0 for r in records])
        self.recent.extend((r.step, r.time) for r in records[-RECENT:])
        self.step = all_steps[-1]

    def _count(self, steps: array[int], seconds: list[float]) -> None:
        """A record's seconds hold for each step since the record before it."""
        whole: Iterable[float] = seconds
        if len(steps) != steps[-1] - self._counted:  # else each step has a record
            whole = map(mul, map(sub, steps, chain([self._counted], steps)), seconds)
        before = self.spent.values[-1] if self.spent.values else 0.0
        sums = array("d", accumulate(whole, initial=before))
        self.spent.add(steps, sums[1:])
        self._counted = steps[-1]

    def _other(self, record: dict[str, Any]) -> None:
        """Add a record that is no point. A start and a rollback drop the later steps."""
        try:
            fields = msgspec.convert(record, _Other)
        except msgspec.ValidationError:
            return
        step = fields.step or 0
        if fields.event == "start":
            self._cut(step)
        elif fields.event == "rollback":
            self._cut(fields.to or 0)
        self.step = max(self.step, step)
        for name, value in (fields.metrics or {}).items() if fields.event in POINTS else ():
            if isinstance(value, int | float):
                with contextlib.suppress(OverflowError):  # hundreds of digits
                    self.of(f"{fields.event}/{name}").add([step], [float(value)])
        if fields.event:
            self.events.append(record)
        if len(self.events) > 2 * KEPT:
            self.events[:KEPT] = [e for e in self.events[:KEPT] if e["event"] in LASTING]

    def _cut(self, step: int) -> None:
        self.step = self._counted = step
        self.recent.clear()
        for series in (self.spent, *self.series.values()):
            series.cut(step)

    def of(self, name: str) -> Series:
        """The series of a name; empty if no record has it."""
        return self.series.setdefault(name, Series())


def whole_lines(path: Path, start: int) -> Iterator[bytes]:
    """Whole lines of a file from a byte on, some megabytes at a time; none if it does not exist.

    An unfinished last line is left out: a process is writing it, or a crash cut it.
    """
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        file.seek(start)
        while data := file.read(CHUNK):
            end = data.rfind(b"\n") + 1
            while end == 0 and (more := file.read(CHUNK)):  # a line longer than a chunk
                data += more
                end = data.rfind(b"\n") + 1
            if end == 0:
                return
            file.seek(end - len(data), os.SEEK_CUR)
            yield data[:end]


def _decoded(data: bytes) -> list[_Line]:
    """The record of each line; an empty list if one of the lines is no record."""
    try:
        return _DECODER.decode_lines(data)
    except msgspec.MsgspecError:  # of some megabytes, one line
        return []


def _one(line: bytes) -> _Line:
    try:
        return _DECODER.decode(line)
    except msgspec.MsgspecError:
        pass
    record = _parsed(line)  # NaN and Infinity are no JSON, but Python writes them
    known = {name: record[name] for name in _Line.__struct_fields__ if name in record}
    try:
        return msgspec.convert(known, _Line)
    except msgspec.ValidationError:
        return _Line()


def _parsed(line: bytes) -> dict[str, Any]:
    return next(parse_lines([line]), {})
