"""Step 4: a run dir for a plan, with what was asked and the script in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from hpcddp import hostapp, record
from hpcddp import plan as plans
from hpcddp.jobfile import Layer
from hpcddp.plan import Plan
from hpcddp.rundir import RunDir, new_id, write_bytes, write_text


def new_run(plan: Plan, root: Path) -> RunDir:
    """A new run dir, ready for plain sbatch; nothing is made if the script cannot be rendered."""
    run = RunDir(root / new_id(plan.spec.name))
    text = plan.render(run, plan.worker_command(run))
    run.create()
    _fill(plan, run, text)
    return run


def _fill(plan: Plan, run: RunDir, text: str, created: float | None = None) -> None:
    record.write(run, plan.record(run, created))
    write_bytes(run.host, hostapp.build())
    write_script(run, text)


def renew(plan: Plan, run: RunDir, created: float) -> None:
    """Put another plan into a run dir that is there."""
    text = plan.render(run, plan.worker_command(run))
    _fill(plan, run, text, created)


def again(
    run: RunDir,
    flags: Layer,
    environ: Mapping[str, str],
    look: Callable[[Plan], None] = lambda made: None,
) -> Plan:
    """Plan what a run was anew, under the flags, and put that into its folder.

    Args:
        look: sees the plan before that.
    """
    job = record.read(run)
    before = Layer().put_all(job.spec, str(run.job))
    if flags.values.get("cluster"):
        for name in ("template", "launcher"):  # of the cluster before
            before.values.pop(name)
    else:
        before.put("cluster", job.cluster, str(run.job))
    made = plans.make([flags, before], [], environ=environ, folder=Path(job.workdir))
    look(made)
    renew(made, run, job.created)
    return made


def write_script(run: RunDir, text: str) -> None:
    """Write job.sbatch, which its owner can start."""
    write_text(run.script, text, 0o755)
