"""Measuring: subject and floor taken in turn, what the takes come to, and the verdict on a limit.

Both sides of a comparison run in the same minutes on the same machine, one after the other, so that
what else the machine does hits both. A figure of one run means nothing beside one of another run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Take = Callable[[], float]
"""One measurement: does the work once and returns what it cost."""


def interleave(
    takes: Sequence[Take], rounds: int, on_round: Callable[[int], None]
) -> list[list[float]]:
    """Measure each subject once a round; the figures of each, in the order of the rounds.

    Every other round goes backwards, so that a machine that slows down slows all alike. One
    take of each comes first and does not count: it fills the file cache and writes byte code.
    """
    for take in takes:
        take()
    taken: list[list[float]] = [[] for _ in takes]
    for number in range(rounds):
        order = range(len(takes)) if number % 2 == 0 else reversed(range(len(takes)))
        for index in order:
            taken[index].append(takes[index]())
        on_round(number + 1)
    return taken


@dataclass(frozen=True)
class Spread:
    """The middle half of some figures."""

    low: float
    median: float
    high: float


def spread(figures: Sequence[float]) -> Spread:
    """Median and quartiles; of a single figure, that figure."""
    if len(figures) == 1:
        return Spread(figures[0], figures[0], figures[0])
    low, middle, high = quantiles(figures, n=4, method="inclusive")
    return Spread(low, middle, high)


def over(ours: float, floor: float) -> float:
    """A ratio; infinite where the floor is nothing."""
    return ours / floor if floor else math.inf


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        ours, floor: figures of the same rounds, in the same order.
        unit: "s", "B", or "" for a plain number.
        ratio_limit: the most that the ratio of the medians may be.
        allowance: what ``ours`` may have beyond that, in units.
        ratio_least: the least that the ratio of the medians may be, where more is better.
        limit: what the median of ``ours`` must stay below, in units.
        apart: a ratio counts only where the middle halves of both sides lie apart.
    """

    name: str
    ours: Sequence[float]
    floor: Sequence[float]
    unit: str = "s"
    ratio_limit: float | None = None
    limit: float | None = None
    allowance: float = 0.0
    ratio_least: float | None = None
    apart: bool = False

    @property
    def ratio(self) -> float:
        """The ratio of the medians: the one that a limit is for."""
        return over(median(self.ours), median(self.floor))

    @property
    def pair_ratio(self) -> float:
        """The median of the ratios within a round; far from ``ratio`` where the machine was not
        steady."""
        return median(over(a, b) for a, b in zip(self.ours, self.floor, strict=True))

    @property
    def met(self) -> bool | None:
        """Whether the limits hold; None where there is none."""
        if (self.ratio_limit, self.limit, self.ratio_least) == (None, None, None):
            return None
        beyond = over(self.allowance, median(self.floor)) if self.allowance else 0.0
        ours, floor = spread(self.ours), spread(self.floor)
        if self.apart and ours.low <= floor.high and floor.low <= ours.high:
            return True
        return (
            (self.ratio_limit is None or self.ratio - beyond <= self.ratio_limit)
            and (self.limit is None or median(self.ours) < self.limit)
            and (self.ratio_least is None or self.ratio >= self.ratio_least)
        )
