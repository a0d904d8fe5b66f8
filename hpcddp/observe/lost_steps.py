"""Why an attempt in which a rank failed has lost steps: no other rank saved the newest one."""

from __future__ import annotations

import itertools
import re

from hpcddp import record
from hpcddp.attempt import decision, launch_facts
from hpcddp.errors import HpcddpError
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, read_lines

FIRST = 4  # records of an attempt that may tell its strategy


def why(run: RunDir, attempt: int, cause: str | None, lost: int) -> str:
    """The reason; "" for an attempt that has lost none, or without such a failure.

    Args:
        cause: why the attempt ended.
        lost: its optimizer steps that must be repeated.
    """
    row = decision.CAUSES.get(cause or "")  # a newer version may have others
    if not (lost and row and row.here):
        return ""
    try:
        return _reason(record.read(run), _strategy(run, attempt))
    except (HpcddpError, OSError):
        return ""


def _reason(job: JobRecord, strategy: str) -> str:
    if job.backend == "local":
        return "on one machine, ranks do not save when another one fails"
    if not launch_facts.of(job.launcher, job.launch).get("spares"):
        return f"with the launcher {job.launcher}, ranks do not save when another one fails"
    replicas = re.search(r"\bddp=(\d+)", strategy)
    if strategy and (not replicas or int(replicas[1]) < 2):
        return f"with the strategy {strategy}, no other rank has the same state"
    return "no rank that was left had the whole newest step, or could save it"


def _strategy(run: RunDir, attempt: int) -> str:
    lines = itertools.islice(read_lines(run.attempt(attempt).metrics), FIRST)
    strategies = (line.get("strategy") for line in lines if line.get("event") == "start")
    return str(next(strategies, None) or "")
