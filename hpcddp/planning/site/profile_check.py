"""`hpcddp cluster check`: a profile, its template, and what bash and sbatch say of its script."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from hpcddp.errors import TemplateError
from hpcddp.planning import plan as plans
from hpcddp.planning.asked import Asked
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir, new_id
from hpcddp.slurm import sbatch

ADVICE = "sbatch refuses --mem: set mem = false in [slurm] of the profile"


class ProfileCheck(NamedTuple):
    """The outcome of a check.

    Args:
        accepted: by sbatch; None if the profile is not for Slurm.
        answer: of sbatch.
        advice: what to change in the profile; "" for nothing.
    """

    plan: Plan
    script: str
    accepted: bool | None
    answer: str
    advice: str = ""


def check(profile: str, environ: Mapping[str, str], folder: Path) -> ProfileCheck:
    """Render the script of the smallest job, and ask bash and sbatch about it.

    Args:
        profile: a profile's name or path.
        folder: the current one.

    Raises:
        UserError: the profile, its template or the script is invalid.
        SlurmUnreachable: there is no answer.
    """
    values = {"cluster": profile, "command": ["bash", "-c", "true"], "name": "check"}
    layer = Layer().put_all(values, "PROFILE")
    plan = plans.make(Asked.read([layer], [], environ), environ=environ, folder=folder)
    run = RunDir(folder / new_id("check"))
    script = plan.render(run, plan.worker_command(run))
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise TemplateError(
            f"the script is not valid: {words[0] if words else 'bash -n fails'}",
            where=str(plan.template), hint="fix the template",
        )  # fmt: skip
    if plan.backend != "slurm":
        return ProfileCheck(plan, script, None, "")
    accepted, answer = sbatch.verdict(script)
    advice = "" if accepted or not refuses_memory(plan, run) else ADVICE
    return ProfileCheck(plan, script, accepted, answer, advice)


def refuses_memory(plan: Plan, run: RunDir) -> bool:
    """Whether the memory that a refused job asks for by itself is why: sbatch accepts it without.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    if not plan.memory:
        return False
    plain = replace(plan, memory=0)
    return sbatch.verdict(plain.render(run, plain.worker_command(run)))[0]
