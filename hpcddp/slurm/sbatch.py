"""sbatch before a submission: whether it is here, and what it says of a script."""

from __future__ import annotations

import shutil

from hpcddp.errors import SlurmUnreachable
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
