"""`hpcddp watch` on a run with a million metric lines, beside a program that only decodes them.

The run also has a million lines with figures of its ranks; `watch` need not read all of them. The
first row is the time from the start of the command to its first picture on a terminal, which it
draws before it has read everything. The other rows are for a whole process that prints one page of
everything. The floor reads the file, decodes each line with msgspec and keeps nothing. The limits
are in seconds, as a ratio to the floor, and in bytes of resident memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp import record
from hpcddp.attempt.ledger import new_attempt
from hpcddp.cli.watch import HINT
from hpcddp.errors import HpcddpError
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, write_json

LINES = 1_000_000
RANKS = 8
FIGURES = {"step_s": "0.01", "wait_s": "0.001", "samples_per_s": "12.5", "memory": "350000000"}
LIMIT = 2.0  # seconds
RATIO_LIMIT = 1.5
SIGN = HINT.encode()  # part of every picture
MEMORY_LIMIT = 300e6  # bytes
FLOOR = """
import sys
import msgspec
decoder = msgspec.json.Decoder()
with open(sys.argv[1], "rb") as f:
    for line in f:
        decoder.decode(line)
"""


# Seconds and peak memory (bytes) of a process, whose parent is small: a fork has its parent's
# memory.
MEASURED = """
import resource, subprocess, sys, time
began = time.perf_counter()
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(time.perf_counter() - began, used.ru_maxrss * 1024)
"""


def rows(site: Site) -> Iterator[Row]:
    run = make(site.fresh(), LINES)
    watch = [HPCDDP, "watch", run.name, "--runs", str(run.path.parent)]
    floor = [PYTHON, "-c", FLOOR, str(run.attempt(1).metrics)]
    ours, base = Taken(watch, site), Taken(floor, site)
    first, _, _ = site.interleave("watch", lambda: _first(watch, site), ours, base)
    yield Row("watch first", first, base.seconds[1:], limit=LIMIT)
    yield Row("watch all", ours.seconds[1:], base.seconds[1:], ratio_limit=RATIO_LIMIT)
    yield Row("watch memory", ours.held[1:], base.held[1:], unit="B", limit=MEMORY_LIMIT)


class Taken:
    """A program, with the seconds and the memory of each run of it."""

    def __init__(self, argv: Sequence[str], site: Site) -> None:
        self._argv, self._site = [PYTHON, "-c", MEASURED, *argv], site
        self.seconds: list[float] = []
        self.held: list[float] = []  # peak resident memory in bytes

    def __call__(self) -> float:
        seconds, held = output(self._argv, self._site.environ, self._site.folder).split()
        self.seconds.append(float(seconds))
        self.held.append(float(held))
        return self.seconds[-1]


def _first(argv: Sequence[str], site: Site) -> float:
    """Seconds until the first picture on a terminal."""
    ours, theirs = pty.openpty()
    began, environ = time.perf_counter(), site.environ | {"TERM": "xterm"}
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
    os.close(theirs)
    try:
        said = b""
        while SIGN not in said:
            said += os.read(ours, 1 << 16)
        taken = time.perf_counter() - began
        os.write(ours, b"q")
        with contextlib.suppress(OSError):  # the program has closed the terminal
            while os.read(ours, 1 << 16):
                pass
        return taken
    except OSError:
        raise HpcddpError("hpcddp watch ended without a picture", hint=said.decode()) from None
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def make(folder: Path, lines: int) -> RunDir:
    """Make a running run with ``lines`` train records."""
    run = RunDir(folder / "runs" / "long")
    run.create()
    spec = {"name": "long", "max_steps": lines}
    record.write(run, JobRecord(run.name, spec, [1, 1], 1, "local", str(folder), created=1e9))
    write_json(run.submission, {"job_id": "1", "submitted": 1e9})
    attempt = run.attempt(1)
    attempt.path.mkdir()
    facts = new_attempt("1", os.getpid())  # counts as running as long as this process
    facts.number, facts.began = 1, 1e9
    write_json(attempt.facts, vars(facts))
    attempt.log.write_text("0: done\n")
    with attempt.metrics.open("w") as f:
        head = {"event": "start", "attempt": 1, "time": 1e9, "step": 0, "epoch": 0}
        f.write(json.dumps(head | {"total_steps": lines, "resumed": None}) + "\n")
        f.writelines(map(_line, range(1, lines + 1)))
    with attempt.ranks.open("w") as f:
        f.writelines(map(_figures, range(1, lines + 1)))
    return run


def _line(step: int) -> str:
    return (
        f'{{"event": "train", "attempt": 1, "time": {1e9 + step / 10}, "step": {step}, '
        f'"epoch": 0, "loss": {1 / step}, "lr": 0.001, "samples_per_s": {100.5 + step % 7}, '
        f'"step_s": 0.01, "wait_s": 0.001, "grad_norm": 1.5}}\n'
    )


def _figures(step: int) -> str:
    """The ranks' figures for one train record."""
    busy = ", ".join(f"{0.005 + rank / 1000 + step % 5 / 1000:.6f}" for rank in range(RANKS))
    same = {name: f"[{', '.join([value] * RANKS)}]" for name, value in FIGURES.items()}
    told = ", ".join(f'"{name}": {values}' for name, values in same.items())
    return f'{{"step": {step}, "time": {1e9 + step / 10}, "busy_s": [{busy}], {told}}}\n'
