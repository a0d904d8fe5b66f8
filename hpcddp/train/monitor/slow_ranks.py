"""Finds slow ranks and slow data, on rank 0, from the figures of all ranks.

A rank is slow if, in three records in a row, it takes ``metrics.slow`` times as long as the median
of the other ranks of its pipeline stage, and longer by at least 5% of a step and 1 ms. One record
reports the start, another one the end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.timing import RankFigures

IN_A_ROW = 3  # records
LEAST = 1e-3  # smallest difference worth a record: seconds a step,
PART = 0.05  # and part of a step's time
NOTHING = 1e-4  # seconds; smallest denominator of a ratio
SHARE = 0.2  # part of a step's time that may pass in waiting for data
WORSE = 1.5  # times the share that was reported
WHAT = {"compute": RankFigures._fields.index("busy_s"), "data": RankFigures._fields.index("wait_s")}


@dataclass
class _Streak:
    """Records in a row in which a rank was slow or, after the report, no longer was."""

    since: int
    since_time: float
    count: int = 0
    reported: bool = False


class SlowRanks:
    """Compares the figures of all ranks.

    Args:
        hosts: the host of each rank.
        stages: the pipeline stage of each rank.
        slow: ``metrics.slow``.
        hint: advice if the training waits for its data.
    """

    def __init__(
        self,
        record: Recorder,
        hosts: Sequence[str],
        stages: Sequence[int],
        slow: float,
        hint: Callable[[], str],
    ) -> None:
        self._record, self._hosts, self._slow, self._hint = record, hosts, slow, hint
        self._groups = [
            [rank for rank, stage in enumerate(stages) if stage == each] for each in {*stages}
        ]
        self._least = LEAST  # seconds a step by which a rank must be slower in this record
        self._streaks: dict[tuple[str, int], _Streak] = {}
        self._before: tuple[int, float] | None = None  # step and time of the last record
        self._waits = 0  # records in a row
        self._share = 0.0  # the reported share

    def look(self, step: int, values: Mapping[str, Any], ranks: Sequence[Sequence[float]]) -> None:
        """Check the figures of one record; ``values`` is empty if all its steps were skipped.

        Args:
            values: the values of the train record.
            ranks: each rank's ``RankFigures``, or only the first figure.
        """
        if len(ranks[0]) > 1:
            columns = dict(zip(RankFigures._fields, zip(*ranks, strict=True), strict=True))
            self._record.ranks(step=step, **{n: _column(n, c) for n, c in columns.items()})
        if self._before is not None:  # the time of the first record includes the start
            if len(ranks[0]) > 1:
                self._least = max(LEAST, PART * max(columns["step_s"]))
                for what, place in WHAT.items():
                    self._compare(step, what, [figures[place] for figures in ranks])
            if values:
                self._wait(step, values)
        self._before = step, time.time()

    def _compare(self, step: int, what: str, values: Sequence[float]) -> None:
        """Compare each rank with the others of its stage."""
        for group in self._groups:
            ranked = sorted((values[rank], rank) for rank in group if not math.isnan(values[rank]))
            if len(ranked) > 1:
                self._rank(step, what, ranked)

    def _rank(self, step: int, what: str, ranked: Sequence[tuple[float, int]]) -> None:
        """Check the slowest ranks and those that were slow: few of a thousand.

        Args:
            ranked: the group's values in ascending order, with their ranks.
        """
        least = ranked[(len(ranked) - 2) // 2][0]  # the smallest possible median of others
        for place in range(len(ranked) - 1, -1, -1):
            own, rank = ranked[place]
            if own - least < 0.5 * self._least and not self._streaks:
                return
            if own - least >= 0.5 * self._least or (what, rank) in self._streaks:
                self._judge(step, what, rank, own, median_of_others(ranked, place))

    def _judge(self, step: int, what: str, rank: int, own: float, median: float) -> None:
        assert self._before
        streak = self._streaks.get((what, rank))
        reported = streak is not None and streak.reported
        over, least = self._slow, self._least
        if reported:
            over, least = 0.5 * (1 + over), 0.5 * least
        slow = own >= over * median and own - median >= least
        if streak is None and not slow:
            return
        streak = streak or _Streak(self._before[0] + 1, self._before[1])
        streak.count = streak.count + 1 if slow != streak.reported else 0
        if streak.count == IN_A_ROW:
            self._report(step, what, rank, streak, own, median)
        if streak.reported or streak.count:
            self._streaks[what, rank] = streak
        else:
            self._streaks.pop((what, rank), None)

    def _report(
        self, step: int, what: str, rank: int, streak: _Streak, own: float, median: float
    ) -> None:
        """Record that a rank is slow, or no longer is."""
        streak.reported, streak.count = not streak.reported, 0
        facts = {"step": step, "rank": rank, "host": self._hosts[rank], "what": what}
        if not streak.reported:
            self._record("recovered", **facts)
            return
        self._record(
            "slow",
            **facts,
            ratio=own / max(median, NOTHING),
            since=streak.since,
            since_time=streak.since_time,
            own_s=own,
            median_s=median,
        )

    def _wait(self, step: int, values: Mapping[str, Any]) -> None:
        """Check whether the training waits for data: all ranks wait for the slowest one."""
        wait = values.get("wait_s", 0.0)
        share = min(1.0, wait / values["step_s"])
        self._waits = self._waits + 1 if share > SHARE and wait >= LEAST else 0
        if self._waits >= IN_A_ROW and (not self._share or share >= WORSE * self._share):
            self._share = share
            self._record("waiting", step=step, share=share, hint=self._hint())


def _column(name: str, values: Sequence[float]) -> list[float | None]:
    """A column of the records, with None for unknown values."""
    if name == "memory":
        return [None if math.isnan(value) else int(value) for value in values]
    return [None if math.isnan(value) else value for value in values]


def median_of_others(ranked: Sequence[tuple[float, int]], place: int) -> float:
    """The median of all values except the one at ``place``.

    Args:
        ranked: at least two values in ascending order, with their ranks.
    """
    count = len(ranked) - 1
    low, high = (ranked[n + (n >= place)][0] for n in ((count - 1) // 2, count // 2))
    return (low + high) / 2
