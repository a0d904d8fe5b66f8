"""The logs of a run, line by line, for a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hpcddp.errors import RunError
from hpcddp.rundir import RunDir


def paths(run: RunDir, attempt: int | None) -> Iterator[Path]:
    """The logs: those of before the claims, then each attempt's; or one attempt's alone."""
    if attempt:
        if not run.attempt(attempt).path.is_dir():
            raise RunError(f"there is no attempt {attempt}", where=run.name)
        yield run.attempt(attempt).log
        return
    yield from sorted(run.path.glob("job-*.log"))
    for folder in run.all_attempts():
        yield folder.log


def put(line: bytes, out: TextIO | None = None) -> None:
    """One line of a log, on stdout by default, made safe for a terminal."""
    out = out or sys.stdout
    if out.isatty():
        line = re.sub(rb"[\x00-\x08\x0b-\x1f\x7f]", lambda m: b"\\x%02x" % m[0][0], line)
    out.buffer.write(line)
    out.flush()
