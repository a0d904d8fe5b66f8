"""A curve is drawn in few points, and summed up from all of them."""

import math

import pytest

from hpcddp.observe.series import Series, means, median, thin


def test_a_thinned_curve_keeps_its_peaks() -> None:
    series = Series()
    series.add(range(10_000), [100.0 if i == 7001 else float(i % 3) for i in range(10_000)])
    steps, values = thin(series, 100)
    assert len(steps) <= 100 and steps == sorted(steps)
    assert values[steps.index(7001)] == 100.0 and min(values) == 0.0
    assert steps[0] == 0 and steps[-1] == 9999  # 0.0 is no peak, and is its last value
    assert thin(series, 2) == ([0, 9999], [0.0, 0.0])


def test_means_are_of_all_points_and_medians_too() -> None:
    series = Series()
    series.add(range(10_000), [9.0 if i % 10 == 0 else 1.0 for i in range(10_000)])
    steps, values = means(series, 100)
    assert steps == [i * 100 + 50 for i in range(100)]
    assert values == pytest.approx([1.8] * 100)
    assert median(series) == 1.0
    series.add([10_000], [math.nan])
    assert means(series, 1)[1] == [pytest.approx(1.8)] and median(series) == 1.0
    series.add(range(10_001, 300_001), [1e308] * 290_000)
    assert means(series, 2)[1][1] == pytest.approx(1e308)  # no sum that is too large
    assert median(series) == 1e308
