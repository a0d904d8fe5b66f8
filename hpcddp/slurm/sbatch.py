"""sbatch: whether it is here, what it says of a script, and what its refusal becomes."""

from __future__ import annotations

import shutil
from pathlib import Path

from hpcddp.errors import SlurmUnreachable, SubmissionRefused
from hpcddp.slurm import commands as slurm


def answers() -> bool:
    """Whether sbatch is here and configured; a controller that is merely away still counts."""
    if not shutil.which("sbatch"):
        return False
    try:
        return slurm.call("sbatch", "--version").returncode == 0
    except SlurmUnreachable:
        return False


def verdict(script: str) -> tuple[bool, str]:
    """What `sbatch --test-only` says of a script: accepted or not, and its words."""
    done = slurm.call("sbatch", "--test-only", text=script)
    return done.returncode == 0, slurm.first_line(done.stderr)


def refusal(words: str, script: Path) -> SubmissionRefused | None:
    """The error that sbatch's words become if it has refused a script; None if it has not: then
    the job may exist all the same."""
    line = error_line(words)
    if not line or slurm.away(words):
        return None
    return SubmissionRefused(
        f"sbatch refused the job: {slurm.first_line(line)}",
        where=str(script),
        hint="mend the flag or the job file and submit again",
    )


def error_line(words: str) -> str:
    """The line of its own that tells what went wrong; "" without one."""
    return next((line for line in words.splitlines() if "sbatch: error" in line), "")
