"""A shell beside a rank of a running job."""

from __future__ import annotations

import sys
from typing import NoReturn

from hpcddp.inside.running import running
from hpcddp.rundir import RunDir
from hpcddp.slurm import steps
from hpcddp.stacks import rank_shell


def become(run: RunDir, rank: int) -> NoReturn:
    """Replace this process by a shell in the environment of a rank, on the rank's node.

    Raises:
        RunError: the run does not run, or does not have this rank.
    """
    now = running(run)
    host = now.host_of(rank)
    number = now.attempt.number
    if not now.slurm:
        rank_shell.become(str(run.path), number, rank)
    words = steps.on_node(str(run.host), "shell", str(run.path), str(number), str(rank))
    if sys.stdin.isatty():
        words = ["--pty", *words]
    steps.become(steps.step(now.job_id, host, 1, words))
