"""`hpcddp report` of a run with a million metric lines, beside a Python that reads them.

Whole processes, from the command to the file. There are as many lines with the figures of its
ranks. The floor decodes each metric line with the standard library, and keeps nothing. Limits:
seconds to the page, and the most memory that the process held.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from benchmarks.watch import make

LINES = 1_000_000
SECONDS = 2.0
BYTES = 300e6
READ = "import json, sys; [json.loads(line) and None for line in open(sys.argv[1])]"
# Seconds of a command, and the most bytes that it held. A small process asks: what a child holds
# before it becomes the command counts too, and that is its parent's.
COST = """
import os, subprocess, sys, time
began = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, code, used = os.wait4(child.pid, 0)
print(time.perf_counter() - began, 1024 * used.ru_maxrss)
sys.exit(code != 0)
"""


def rows(site: Site) -> Iterator[Row]:
    run = make(site.fresh(), LINES)
    report = [HPCDDP, "report", str(run.path), "-o", str(site.folder / "page.html")]
    read = [PYTHON, "-c", READ, str(run.attempt(1).metrics)]
    held: dict[str, list[float]] = {"report": [], "read": []}

    def take(name: str, command: list[str]) -> float:
        told = output([PYTHON, "-c", COST, *command], site.environ, site.folder)
        seconds, size = map(float, told.split())
        held[name].append(size)
        return seconds

    ours, floor = site.interleave(
        "report", lambda: take("report", report), lambda: take("read", read)
    )
    yield Row("report, 1M lines", ours, floor, limit=SECONDS)
    yield Row("report, memory", held["report"], held["read"], unit="B", limit=BYTES)
