"""`hpcddp watch` on a run of a million metric lines, beside what merely decodes them.

Whole processes, from the start of the command to its page on a pipe: `--once` reads everything
first, as the first picture on a terminal does. The floor reads the file and decodes each line with
msgspec, and keeps nothing. The limits are in seconds and in bytes of resident memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site
from hpcddp import record
from hpcddp.errors import HpcddpError
from hpcddp.ledger import Attempt
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, write_json

LINES = 1_000_000
LIMIT = 2.0  # seconds
MEMORY_LIMIT = 300e6  # bytes
FLOOR = """
import sys
import msgspec
decoder = msgspec.json.Decoder()
with open(sys.argv[1], "rb") as f:
    for line in f:
        decoder.decode(line)
"""


def rows(site: Site) -> Iterator[Row]:
    run = make(site.fresh(), LINES)
    watch = [HPCDDP, "watch", run.name, "--runs", str(run.path.parent)]
    floor = [PYTHON, "-c", FLOOR, str(run.attempt(1).metrics)]
    sides: list[list[tuple[float, float]]] = [[], []]
    site.interleave(
        "watch", lambda: _take(watch, site, sides[0]), lambda: _take(floor, site, sides[1])
    )
    (ours, held), (base, base_held) = (
        [list(x) for x in zip(*side[1:], strict=True)] for side in sides
    )
    yield Row("watch", ours, base, limit=LIMIT)
    yield Row("watch memory", held, base_held, unit="B", limit=MEMORY_LIMIT)


def _take(argv: Sequence[str], site: Site, told: list[tuple[float, float]]) -> float:
    """Seconds that a process takes; these and its bytes are noted."""
    began = time.perf_counter()
    process = subprocess.Popen(argv, env=site.environ, stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    if process.returncode:
        raise HpcddpError(f"{argv[0]}: exit code {process.returncode}")
    told.append((time.perf_counter() - began, used.ru_maxrss * 1024.0))
    return told[-1][0]


def make(folder: Path, lines: int) -> RunDir:
    """A run that has written so many train records, and is done."""
    run = RunDir(folder / "runs" / "long")
    run.create()
    spec = {"name": "long", "max_steps": lines}
    record.write(run, JobRecord(run.name, spec, [1, 1], 1, "local", str(folder), created=1e9))
    write_json(run.submission, {"job_id": "1", "submitted": 1e9})
    attempt = run.attempt(1)
    attempt.path.mkdir()
    facts = Attempt(1, "1", "n1", 1, "1", False, "n1", 1e9, ended=2e9, exit_code=0, cause="done")
    write_json(attempt.facts, vars(facts))
    attempt.log.write_text("0: done\n")
    with attempt.metrics.open("w") as f:
        head = {"event": "start", "attempt": 1, "time": 1e9, "step": 0, "epoch": 0}
        f.write(json.dumps(head | {"total_steps": lines, "resumed": None}) + "\n")
        f.writelines(map(_line, range(1, lines + 1)))
    return run


def _line(step: int) -> str:
    return (
        f'{{"event": "train", "attempt": 1, "time": {1e9 + step / 10}, "step": {step}, '
        f'"epoch": 0, "loss": {1 / step}, "lr": 0.001, "samples_per_s": {100.5 + step % 7}, '
        f'"step_s": 0.01, "wait_s": 0.001, "grad_norm": 1.5}}\n'
    )
