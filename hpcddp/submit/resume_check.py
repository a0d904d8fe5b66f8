"""Step 4 of `hpcddp resume`: whether the newest checkpoint is of the model that the plan makes.

Otherwise a job would wait for hours, and then fail to read its checkpoint. Each resume checks it,
also without a changed value: the task's code lies in the user's folder and may have changed. That
takes as long as importing torch and the task.
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
    """Compare names and shapes; nothing in the run dir changes.

    Returns: why they could not be compared here, so that the first attempt does; else "".

    Raises:
        UserError: the checkpoint is of another model or format, or the model cannot be
            made with the job's values.
    """
    newest = ledger.newest_step(run)
    if plan.spec.command or newest == 0:
        return ""
    if newest is None:
        return "the checkpoints cannot be read now"
    if importlib.util.find_spec("torch") is None:
        return "there is no torch in this Python"
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
