"""Step 13: one curve as steps and values, and the fewer points in which it is drawn.

``curves.py`` fills it from the metrics of a run.
"""

from __future__ import annotations

import itertools
import math
import statistics
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

SORTED = 1 << 17  # values for a median


class Series:
    """One curve: its values by step."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Add points; they replace those from their first step on."""
        if self.steps and steps[0] <= self.steps[-1]:
            self.cut(steps[0] - 1)
        self.steps.extend(array("q", steps))  # an array of its own: copied in one piece
        self.values.extend(array("d", values))

    def before(self, step: int) -> float:
        """The value at a step, or at the last one before it; 0 if there is none."""
        size = bisect_right(self.steps, step)
        return self.values[size - 1] if size else 0.0

    def cut(self, step: int) -> None:
        """Drop the points after a step."""
        size = bisect_right(self.steps, step)
        del self.steps[size:], self.values[size:]


def thin(series: Series, points: int) -> tuple[list[int], list[float]]:
    """At most this many points with the look of the curve: its ends, and each stretch's peaks.

    Args:
        points: 2 at least.
    """
    size = len(series)
    if size <= points:
        return series.steps.tolist(), series.values.tolist()
    kept = {0, size - 1}
    for low, high in _stretches(size, points // 2 - 1):
        part = series.values[low:high].tolist()  # NaN is found in a list, since it is itself
        kept |= {low + part.index(min(part)), low + part.index(max(part))}
    indices = sorted(kept)
    return [series.steps[i] for i in indices], [series.values[i] for i in indices]


def means(series: Series, points: int) -> tuple[list[int], list[float]]:
    """A longer curve in this many stretches: the mean of each, at the step in its middle.

    NaN where a stretch has no number.
    """
    steps, values = [], []
    for low, high in _stretches(len(series), points):
        part: Sequence[float] = series.values[low:high]
        if not math.isfinite(sum(part)):
            part = list(filter(math.isfinite, part))
        steps.append(series.steps[(low + high) // 2])
        values.append(sum(x / len(part) for x in part) if part else math.nan)
    return steps, values


def median(series: Series) -> float:
    """The median of a curve's values; of a very long curve, that of a sample."""
    known = list(filter(math.isfinite, series.values[:: len(series) // SORTED + 1]))
    return statistics.median(known) if known else math.nan


def _stretches(size: int, count: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each of this many parts."""
    return itertools.pairwise(i * size // count for i in range(count + 1)) if count else iter(())
