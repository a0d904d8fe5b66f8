"""Rows -> a table of 80 columns, and plain data for a JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.measure import Row, Spread, spread

HEAD = ("benchmark", "hpcddp", "floor", "ratio", "pairs", "limit")
LEGEND = (
    "Medians (and quartiles). ratio: ratio of the two medians, which has the limit.\n"
    "pairs: median of the ratios of each pair."
)
SCALES = {"s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")), "B": ((1e6, "MB"), (1e3, "kB"), (1, "B")),
          "": ((1.0, ""),)}  # fmt: skip
SCHEMA_VERSION = 1


def table(rows: Sequence[Row]) -> str:
    """All rows, aligned."""
    cells = [HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    lines = (
        " ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    ours, floor = spread(row.ours), spread(row.floor)
    scale, unit = next(
        (s for s in SCALES[row.unit] if min(ours.median, floor.median) >= s[0]),
        SCALES[row.unit][-1],
    )
    verdict = ""
    if row.met is not None:
        verdict = f"{_limit(row, scale, unit)} {'met' if row.met else 'NOT MET'}"
    return (
        f"{row.name}, {unit}" if unit else row.name,
        _figures(ours, scale),
        _figures(floor, scale),
        _ratio(row.ratio),
        _ratio(row.pair_ratio),
        verdict,
    )


def _limit(row: Row, scale: float, unit: str) -> str:
    if row.limit is not None:
        most = f", each {2 * row.limit / scale:g}" if row.twice else ""
        return f"{row.limit / scale:g} {unit}{most}"
    if row.ratio_limit is None:
        return f">={row.ratio_least:.2f}"
    more = f"+{row.allowance:g} {row.unit}" if row.allowance else ""
    return f"{row.ratio_limit:.2f}{more}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _figures(found: Spread, scale: float) -> str:
    """Median and quartiles with three digits each."""
    low, middle, high = (_digits(x / scale) for x in (found.low, found.median, found.high))
    return f"{middle} ({low}-{high})"


def _digits(value: float) -> str:
    places = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{places}f}"


def machine() -> dict[str, Any]:
    """Facts about this machine."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def data(rows: Iterable[Row], facts: dict[str, Any]) -> dict[str, Any]:
    """All figures and the results, as plain data."""
    found = [
        {**asdict(row), "ratio": row.ratio, "pair_ratio": row.pair_ratio, "met": row.met}
        for row in rows
    ]
    return {"schema_version": SCHEMA_VERSION, "machine": facts, "rows": found}
