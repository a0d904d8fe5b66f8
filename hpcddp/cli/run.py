"""`hpcddp run`: one rank in this very process, so that a debugger works."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcddp.cli.options import complete_jobs, job_options, plan_job, runs_option, runs_root
from hpcddp.errors import UserError


@click.command()
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this many optimizer steps.")
@job_options
@runs_option
def run(job: str | None, steps: int | None, runs: str | None, **given: Any) -> None:
    """Train JOB in this one process, with one rank and nothing started: for a debugger."""
    from hpcddp.attempt import decision, ledger
    from hpcddp.cli.terminal.progress import Progress
    from hpcddp.submit import prepare
    from hpcddp.topology import Rank
    from hpcddp.worker import run as train

    for name in ("nodes", "gpus"):
        if given[name] not in (None, "1"):
            hint = "hpcddp submit --cluster local starts several"
            raise UserError("there is one rank", where=f"--{name}", hint=hint)
    given |= {"cluster": "local", "nodes": "1", "gpus": "1"}
    plan = plan_job(job, given)
    if plan.spec.command:
        hint = "hpcddp submit --cluster local starts it; a debugger starts its script by itself"
        raise UserError("the job has a command, and no task", where="command", hint=hint)
    folder = prepare.new_run(plan, runs_root(runs))
    facts = ledger.life(str(os.getpid()), os.getpid())
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
