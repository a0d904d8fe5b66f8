"""`hpcddp --help` beside a Python that imports click.

Whole processes, including the interpreter and the imports. The floor is the cost of any command
line made with click before its own first line. Both run the same interpreter in an empty folder.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, wall

LIMIT = 1.3


def rows(site: Site) -> Iterator[Row]:
    folder = site.fresh()
    ours, floor = site.interleave(
        "help",
        lambda: wall([HPCDDP, "--help"], site.environ, folder),
        lambda: wall([PYTHON, "-c", "import click"], site.environ, folder),
    )
    yield Row("help", ours, floor, ratio_limit=LIMIT)
