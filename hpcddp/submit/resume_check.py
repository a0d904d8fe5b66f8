"""Step 4 of `hpcddp resume`: whether the newest checkpoint fits the model of the plan.

Without this check a job would wait for hours, and then fail to load its checkpoint. Every resume
checks, even without a changed key: the task's code is in the user's folder and may have changed.
The check takes as long as importing torch and the task.
"""

from __future__ import annotations

import importlib.util

from hpcddp.attempt import ledger
from hpcddp.compare import model_query
from hpcddp.errors import UserError
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir

PATIENCE = 120.0  # seconds for importing torch and the task, and for making the model


def check(plan: Plan, run: RunDir) -> str:
    """Compare names and shapes; the run folder does not change.

    Returns: why they cannot be compared here and the first attempt has to; else "".

    Raises:
        UserError: the checkpoint has another model or format, or the job's values do not make a
            model.
    """
    newest = ledger.newest_step(run)
    if plan.spec.command or newest == 0:
        return ""
    if newest is None:
        return "the checkpoints cannot be read now"
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed in this Python"
    asked = {"run": str(run.path)}
    try:
        answer = model_query.ask(
            "hpcddp.train.model_match", plan.spec, plan.workdir, asked, PATIENCE
        )
    except (model_query.NoAnswer, OSError) as error:
        return str(error)
    if "error" in answer:
        raise UserError(**answer["error"])
    return str(answer["unknown"])
