"""python -m benchmarks [NAME...] [--pairs N] [--json FILE] [--against COMMIT]

Measure hpcddp beside a floor and check the limits, or compare this checkout with another commit.

Exit code 0 if all limits are met, 1 if a limit is not met or a benchmark failed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks import (
    against,
    agree,
    armed,
    detect,
    goodput,
    help,
    idle,
    leave,
    program,
    ranks,
    recover,
    render,
    report,
    report_page,
    sampler,
    save,
    spread,
    start,
    step,
    stores,
    submit,
    timing,
    watch,
)
from benchmarks.measure import Row
from benchmarks.site import Site
from hpcddp.errors import HpcddpError
from hpcddp.sizes import counted

BENCHMARKS: dict[str, Callable[[Site], Iterator[Row]]] = {
    "help": help.rows,
    "render": render.rows,
    "submit": submit.rows,
    "detect": detect.rows,
    "ranks": ranks.rows,
    "sampler": sampler.rows,
    "start": start.rows,
    "program": program.rows,
    "step": step.rows,
    "metrics": timing.rows,
    "spread": spread.rows,
    "save": save.rows,
    "agree": agree.rows,
    "leave": leave.rows,
    "goodput": goodput.rows,
    "recover": recover.rows,
    "armed": armed.rows,
    "idle": idle.rows,
    "stores": stores.rows,
    "watch": watch.rows,
    "report": report_page.rows,
}


def main(argv: Sequence[str]) -> int:
    """Run the named benchmarks, or all of them; return the exit code."""
    given = _arguments(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    facts = report.machine()
    cpus, load = facts["cpus"], facts["load"]
    print(f"Python {facts['python']}, {counted(cpus, 'CPU')}, load {load:.1f} at the start, "
          f"{counted(given.pairs, 'pair')}")  # fmt: skip
    rows, missing = _against(given) if given.against else _measured(given)
    print(report.table(rows), report.LEGEND, *missing, sep="\n")
    if given.json:
        given.json.write_text(json.dumps(report.data(rows, facts), indent=1) + "\n")
    return int(bool(missing) or any(row.met is False for row in rows))


def _measured(given: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """The rows, and a line for each benchmark that failed."""
    rows: list[Row] = []
    missing = []
    with Site(given.pairs) as site:
        for name in given.names or BENCHMARKS:
            try:
                rows.extend(BENCHMARKS[name](site))
            except HpcddpError as error:
                missing.append(f"{name}: NOT MEASURED: {error}")
    return rows, missing


def _against(given: argparse.Namespace) -> tuple[list[Row], list[str]]:
    """The rows of a comparison with another commit, and a line if it failed."""
    try:
        return against.rows(given.against, given.names or list(BENCHMARKS), given.pairs), []
    except HpcddpError as error:
        return [], [f"NOT MEASURED: {error}"]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ", ".join(BENCHMARKS)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"Benchmarks to run: {names} (default: all)."
    )
    parser.add_argument(
        "--pairs", type=int, default=9, metavar="N", help="Measurements of each side (default: 9)."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="File for all figures.")
    text = f"Commit to compare with, in at least {against.LEAST} pairs."
    parser.add_argument("--against", metavar="COMMIT", help=text)
    given = parser.parse_args(argv)
    for name in given.names:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; use {names}")
    if given.against:
        given.pairs = max(given.pairs, against.LEAST)
    if given.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {given.pairs}")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
