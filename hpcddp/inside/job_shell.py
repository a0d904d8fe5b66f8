"""A shell beside a rank of a running job."""

from __future__ import annotations

import sys
from typing import NoReturn

from hpcddp import record
from hpcddp.errors import RunError
from hpcddp.inside.running import running
from hpcddp.rundir import RunDir
from hpcddp.slurm import other_clusters, steps
from hpcddp.stacks import rank_shell


def become(run: RunDir, rank: int) -> NoReturn:
    """Replace this process by a shell in the environment of a rank, on the rank's node and in its
    container.

    Raises:
        RunError: the run is not running, it has no such rank, or a shell cannot enter its
            container.
    """
    now = running(run)
    host = now.host_of(rank)
    number = now.attempt.number
    job = record.read(run)
    container = job.container
    enter = [str(word) for word in container.get("command", ())]
    if container and not enter:
        what = f"a shell cannot enter a container of {container['runtime']}"
        hint = f"beside it: srun --jobid={now.job_id} --overlap --nodelist={host} --pty bash"
        raise RunError(what, where=run.name, hint=hint)
    if not now.slurm:
        rank_shell.become(str(run.path), number, rank, enter)
    words = steps.on_node(str(run.host), "shell", str(run.path), str(number), str(rank), *enter)
    if sys.stdin.isatty():
        words = ["--pty", *words]
    with other_clusters.asked(job.clusters):
        steps.become(steps.step(now.job_id, host, 1, words, now.attempt.release))
