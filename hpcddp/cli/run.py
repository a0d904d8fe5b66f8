"""`hpcddp run`: train one rank in this process, so that a debugger works."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcddp.cli.options import (
    JOB,
    complete_jobs,
    job_options_except,
    plan_job,
    runs_option,
    runs_root,
)
from hpcddp.cli.terminal.sections import SectionCommand, option
from hpcddp.errors import UserError

ONE = ("`run` uses one process", "use `hpcddp submit --cluster local` for several")
HERE = ("`run` trains in this process", "use `hpcddp submit` for a job of Slurm")
# Option -> why `run` refuses it, and a hint.
REFUSED = {
    **dict.fromkeys(("--nodes", "--gpus", "--total-gpus", "--procs", "--launcher"), ONE),
    "--spares": ONE,
    **dict.fromkeys(("--time", "--partition", "--account", "--qos", "--sbatch"), HERE),
    **dict.fromkeys(("--mem", "--constraint"), HERE),
    **dict.fromkeys(("--cluster", "--template"), HERE),
    "--env": ("`run` trains in this process", "set the variable before: NAME=VALUE hpcddp run"),
    "--no-snapshot": ("only jobs with a command have a code snapshot", "leave --no-snapshot out"),
}


@click.command(cls=SectionCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@job_options_except(REFUSED)
@option(JOB, "--steps", metavar="N", type=click.IntRange(min=1),
        help="Stop after this many optimizer steps.")  # fmt: skip
@runs_option
def run(job: str | None, steps: int | None, runs: str | None, **given: Any) -> None:
    """Train JOB in this process with one rank, for a debugger.

    It starts no other process, and uses at most one GPU.
    """
    from hpcddp.attempt import decision, ledger
    from hpcddp.cli.terminal.progress import Progress
    from hpcddp.submit import prepare
    from hpcddp.topology import Rank
    from hpcddp.worker import run as train

    given |= {"cluster": "local", "nodes": "1", "gpus": "1"}
    plan = plan_job(job, given)
    if plan.spec.command:
        hint = "use `hpcddp submit --cluster local`, or start the script in a debugger"
        raise UserError("`run` requires a task, and the job has a command", where="command",
                        hint=hint)  # fmt: skip
    folder = prepare.new_run(plan, runs_root(runs, new=True))
    facts = ledger.new_attempt(str(os.getpid()), os.getpid())
    ledger.begin(folder, facts, lambda earlier: False)
    click.echo(f"run     {folder.name}\nfolder  {folder.path}", err=True)
    outcome = decision.CRASH
    try:
        with Progress() as progress:
            outcome = train(
                folder, Rank(0, 1, 0, 1, 0), 1, max_steps=steps, on_record=progress.show
            )
    finally:
        ledger.end(folder, facts.number, int(outcome == decision.CRASH), outcome)
