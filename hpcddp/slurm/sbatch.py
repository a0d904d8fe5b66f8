"""sbatch: whether it is installed, its verdict on a script, and the error of its refusal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hpcddp.errors import SlurmUnreachable, SubmissionRefused
from hpcddp.slurm import commands as slurm

SAYS = "sbatch: error"


def answers() -> bool:
    """Whether sbatch is installed and configured; its controller may be unreachable.

    Raises:
        SlurmUnreachable: the sandbox of this shell is down.
    """
    slurm.check_sandbox(os.environ)
    if not shutil.which("sbatch"):
        return False
    try:
        return slurm.call("sbatch", "--version").returncode == 0
    except SlurmUnreachable:
        return False


def verdict(script: str) -> tuple[bool, str]:
    """The verdict of `sbatch --test-only` on a script: accepted or not, and its message."""
    done = slurm.call("sbatch", "--test-only", text=script)
    return done.returncode == 0, slurm.first_line(done.stderr)


def refusal(words: str, script: Path) -> SubmissionRefused | None:
    """The error of a script that sbatch refused; None if its message is no refusal: then the job
    may exist all the same."""
    lines = [slurm.first_line(line) for line in words.splitlines() if SAYS in line]
    if not lines or slurm.away(words):
        return None
    return SubmissionRefused(
        f"sbatch refused the job: {'; '.join(lines)}",
        where=str(script),
        hint="fix the option or the job file, and submit again",
    )


def error_line(words: str) -> str:
    """sbatch's first error line; "" without one."""
    return next((line for line in words.splitlines() if SAYS in line), "")
