"""Rehearsal: the time limit of one attempt of a job, by a file and Slurm's prolog."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hpcddp.attempt.ledger import Attempt
from hpcddp.slurm import commands as slurm

KNOWN = 10  # more seconds for an attempt that learns its limit only when it asks Slurm again
FILE = "limit"  # beside the sandbox's folder: seconds for the next attempt, once
USUAL = "7-00:00:00"  # the time limit of the other attempts, which none reaches
USUAL_SECONDS = 7 * 86400.0
# Sets the time limit of one attempt in seconds: Slurm's own is in minutes. It runs before the
# script, so that the job knows its limit from the start, like any other job.
PROLOG = """\
#!/bin/sh
[ "$SLURM_JOB_PARTITION" = low ] || exit 0
mv {folder}/limit {folder}/limit.taken 2>/dev/null || exit 0
for again in 1 2 3 4 5; do  # a busy Slurm may refuse
    {scontrol} update JobId="$SLURM_JOB_ID" EndTime=now+"$(cat {folder}/limit.taken)" && break
    sleep 0.5
done
exit 0
"""


def limit_next(folder: Path, seconds: float) -> None:
    """Give the next attempt a time limit.

    Args:
        folder: that of the rehearsal, where the prolog looks.
    """
    path = folder / FILE
    aside = path.with_suffix(".new")
    aside.write_text(f"{seconds:.0f}")
    aside.replace(path)


def limit_now(folder: Path, job_id: str) -> None:
    """Give an attempt that has begun the limit that waits, if one does. A restart in place has no
    prolog.

    Args:
        folder: that of ``limit_next``.
    """
    path = folder / FILE
    with suppress(FileNotFoundError):
        seconds = float(path.read_text()) + KNOWN
        path.unlink()
        slurm.call("scontrol", "update", f"JobId={job_id}", f"EndTime=now+{seconds:.0f}")


def deadline(facts: Attempt) -> float:
    """The end of an attempt's time limit, in seconds since the epoch; 0 where `limit_next` gave it
    none."""
    if facts.deadline is None or facts.deadline >= facts.began + USUAL_SECONDS / 2:
        return 0.0
    return facts.deadline
