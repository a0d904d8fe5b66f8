"""The logs of a run, line by line, for a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hpcddp.errors import RunError
from hpcddp.rundir import RunDir
from hpcddp.sizes import counted


def paths(run: RunDir, attempt: int | None) -> Iterator[Path]:
    """The logs: those from before the attempts, then those of the attempts; or only that of one."""
    if attempt:
        if not run.attempt(attempt).path.is_dir():
            made = len(run.all_attempts())
            hint = f"the run has {counted(made, 'attempt')}; `hpcddp why {run.name}` lists them"
            raise RunError(f"no attempt {attempt}", where=run.name, hint=hint)
        yield run.attempt(attempt).log
        return
    yield from sorted(run.path.glob("job-*.log"))
    for folder in run.all_attempts():
        yield folder.log


def put(line: bytes, out: TextIO | None = None) -> None:
    """Print a line of a log, to stdout by default. On a terminal its control characters are
    escaped."""
    out = out or sys.stdout
    if out.isatty():
        line = re.sub(rb"[\x00-\x08\x0b-\x1f\x7f]", lambda m: b"\\x%02x" % m[0][0], line)
    out.buffer.write(line)
    out.flush()
