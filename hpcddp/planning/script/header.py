"""The first comment of a script, for its reader: by which command it was made, and what it runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import NamedTuple

from hpcddp import __version__
from hpcddp.planning.script.hidden_values import hidden_words
from hpcddp.spec import JobSpec

LONGEST = 500  # characters of a line


class Origin(NamedTuple):
    """Where a job's values come from.

    Args:
        line: the words of the command line, without the program; empty if a program planned it.
        job_file: its path; "" without one.
    """

    line: tuple[str, ...] = ()
    job_file: str = ""


def lines(origin: Origin, job: JobSpec) -> Iterator[str]:
    """The comment's lines, without `#`. Values that look like secrets are left out."""
    by = f", by: {_shown('hpcddp', *origin.line)}" if origin.line else ""
    yield f"Made by hpcddp {__version__}{by}"
    if origin.job_file:
        yield f"Job file: {origin.job_file}"
    if not job.command:
        yield f"Each rank runs the task {job.task}"
        return
    yield f"Each rank runs: {_shown(*job.command)}"
    if job.resume_command:
        yield f"From the second attempt on: {_shown(*job.resume_command)}"


def comment(text: str) -> str:
    """A line of a script that is a comment, whatever its text holds: a character that could end the
    line is written as Python would."""
    plain = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return f"# {plain[:LONGEST]}{' ...' if plain[LONGEST:] else ''}"


def _shown(*words: str) -> str:
    return shlex.join(hidden_words(words))
