"""Measurements of subject and floor in turn, their statistics, and the check of a limit.

Both sides of a comparison run in turn on the same machine at the same time, so other load affects
both. Figures of different runs must not be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

Take = Callable[[], float]
"""One measurement: does the work once and returns its cost."""


def interleave(
    takes: Sequence[Take], rounds: int, on_round: Callable[[int], None]
) -> list[list[float]]:
    """Measure each subject once per round; return the figures of each, by round.

    Every other round has the reverse order, so a machine that slows down affects all subjects
    equally. A first measurement of each does not count: it fills the file cache and compiles
    modules.
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
    """Median and quartiles."""

    low: float
    median: float
    high: float


def spread(figures: Sequence[float]) -> Spread:
    """Median and quartiles of figures; three times the same for a single figure."""
    if len(figures) == 1:
        return Spread(figures[0], figures[0], figures[0])
    low, middle, high = quantiles(figures, n=4, method="inclusive")
    return Spread(low, middle, high)


def over(ours: float, floor: float) -> float:
    """The ratio of two figures; infinite for a floor of 0."""
    return ours / floor if floor else math.inf


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        ours, floor: figures of the same rounds, in the same order.
        unit: "s", "B", or "" for a plain number.
        ratio_limit: upper limit of the ratio of the medians.
        allowance: added to ``ratio_limit`` times the floor, in units.
        ratio_least: lower limit of the ratio of the medians, where more is better.
        limit: upper limit of the median of ``ours``, in units (exclusive).
        apart: check the ratio only if the interquartile ranges of both sides do not overlap.
        twice: none of ``ours`` may be above twice the limit.
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
    twice: bool = False

    @property
    def ratio(self) -> float:
        """The ratio of the medians, which is checked against the limits."""
        return over(median(self.ours), median(self.floor))

    @property
    def pair_ratio(self) -> float:
        """The median of the ratios of each round. It differs from ``ratio`` under unsteady load."""
        return median(over(a, b) for a, b in zip(self.ours, self.floor, strict=True))

    @property
    def met(self) -> bool | None:
        """Whether the limits are met; None without limits."""
        if (self.ratio_limit, self.limit, self.ratio_least) == (None, None, None):
            return None
        beyond = over(self.allowance, median(self.floor)) if self.allowance else 0.0
        ours, floor = spread(self.ours), spread(self.floor)
        if self.apart and ours.low <= floor.high and floor.low <= ours.high:
            return True
        return (
            (self.ratio_limit is None or self.ratio - beyond <= self.ratio_limit)
            and (self.limit is None or median(self.ours) < self.limit)
            and (not self.twice or max(self.ours) <= 2 * (self.limit or math.inf))
            and (self.ratio_least is None or self.ratio >= self.ratio_least)
        )
