"""TemplateExecutor: submitit submits our script instead of its own."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import submitit

from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir
from hpcddp.slurm import environment, time_limit
from hpcddp.worker import Worker

TIMEOUT = 60  # seconds for sbatch


class TemplateExecutor(submitit.SlurmExecutor):
    """A SlurmExecutor whose sbatch text is the rendered template.

    Args:
        plan: the checked plan.
        run: the run; submitit's own files are in its folder `submitit`.
    """

    def __init__(self, plan: Plan, run: RunDir) -> None:
        super().__init__(run.submitit)
        self.plan = plan
        self.run = run
        limit = time_limit.seconds(str(plan.spec.slurm.get("time", "0")), "time")
        minutes = int(min(limit, 366 * 86400) // 60)
        # submitit writes none of these into the script, but uses them for its own counts.
        self.update_parameters(
            nodes=plan.allocated.max, ntasks_per_node=plan.ranks_per_node, time=minutes
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        """The script of the run, as it was rendered; `command` starts a rank too, but its imports
        take 0.4 s."""
        return self.run.script.read_text(encoding="utf-8")

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        dropped = [word for name in environment.leaking(os.environ) for word in ("-u", name)]
        return ["timeout", str(TIMEOUT), "env", *dropped, "sbatch", str(self.run.script)]


def submit(plan: Plan, run: RunDir) -> str:
    """Submit the run; the job id."""
    umask = os.umask(0o077)  # the batch script rejects a pickle that others could have written
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the error has sbatch's message
            job: Any = TemplateExecutor(plan, run).submit(Worker(str(run.path)))
    finally:
        os.umask(umask)
    return str(job.job_id)
