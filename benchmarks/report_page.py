"""`hpcddp report` of a run with a million metric lines, beside a Python that reads them.

Whole processes, from the command to the file. The floor decodes each line with the standard library
and keeps nothing. Limits: seconds to the page, and the most memory that the process held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp import record
from hpcddp.ledger import Attempt
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, write_json

LINES = 1_000_000
SECONDS = 2.0
BYTES = 300e6
READ = "import json, sys; [json.loads(line) and None for line in open(sys.argv[1])]"
LINE = (
    '{"event": "train", "attempt": 1, "time": %.1f, "step": %d, "epoch": 0, "loss": %.9f, '
    '"lr": 0.001, "samples_per_s": %.1f, "step_s": 0.01, "wait_s": 0.001, "grad_norm": 1.5}\n'
)
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
    run = made(site.fresh() / "long")
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


def made(path: Path) -> RunDir:
    """A run that has told a million steps."""
    run = RunDir(path)
    run.create()
    spec = {"name": "long", "task": "long.py", "max_steps": LINES}
    record.write(run, JobRecord(run.name, spec, [1, 1], 1, "local", str(path.parent), created=1e9))
    write_json(run.submission, {"job_id": "1", "submitted": 1e9})
    attempt = run.attempt(1)
    attempt.path.mkdir()
    facts = Attempt(1, "1", "n1", 1, "1", True, "n1", 1e9, ended=1.1e9, cause="done", exit_code=0)
    write_json(attempt.facts, asdict(facts))
    common = {"attempt": 1, "epoch": 0}
    with attempt.metrics.open("w") as f:
        start = {"event": "start", "step": 0, "time": 1e9, "total_steps": LINES, "resumed": None}
        f.write(json.dumps(start | common) + "\n")
        for step in range(1, LINES + 1):
            f.write(LINE % (1e9 + step * 0.1, step, 1 / step, 100.5 + step % 7))
    return run
