"""`hpcddp report` of a run with a million metric lines, beside a Python that reads them.

Whole processes, from the command to the file. The run also has a million lines with figures of its
ranks. The floor decodes each metric line with the standard library and keeps nothing. The limits
are the time until the page is written (seconds) and the peak of the process's memory (bytes).
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
# Seconds and peak of memory (bytes) of a command. A small process starts it, because the memory
# that a child has before exec, which is its parent's, counts too.
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
