"""`hpcddp stop`, `preempt`, `cancel` and `resume`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import (
    advise,
    complete_runs,
    flags,
    job_options,
    json_option,
    runs_option,
    runs_root,
)

if TYPE_CHECKING:
    from hpcddp.planning.plan import Plan


@click.command()
@click.argument("run", shell_complete=complete_runs)
@runs_option
@json_option
def stop(run: str, runs: str | None, as_json: bool) -> None:
    """Save a checkpoint of RUN at the next step, then end it; it is not queued again."""
    ask(run, runs, "stop", as_json)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@runs_option
@json_option
def preempt(run: str, runs: str | None, as_json: bool) -> None:
    """Save a checkpoint of RUN at the next step and leave; it comes back by itself."""
    ask(run, runs, "preempt", as_json)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@runs_option
@json_option
def cancel(run: str, runs: str | None, as_json: bool) -> None:
    """End RUN now."""
    ask(run, runs, "cancel", as_json)


def ask(token: str, runs: str | None, want: str, as_json: bool) -> None:
    """Pass a request on and say so."""
    from hpcddp.submit import submission

    run = submission.find(runs_root(runs), token)
    before = submission.request(run, want)
    if as_json:
        line = {"schema_version": 1, "run": run.name, "asked": want, "state": before.state}
        click.echo(json.dumps(line | {"job_id": before.job_id}))
    else:
        click.echo(f"{want} asked of {run.name} (was {before.state}, job {before.job_id})")


@click.command()
@click.argument("run", shell_complete=complete_runs)
@job_options
@runs_option
@click.option("--follow/--detach", default=None, help="Show the log until the end, or return.")
@json_option
def resume(run: str, runs: str | None, follow: bool | None, as_json: bool, **given: Any) -> int:
    """Go on with RUN from its newest checkpoint, also with other nodes, GPUs or values."""
    from hpcddp.cli.submit import announce
    from hpcddp.planning import earlier_runs
    from hpcddp.submit import prepare, resume_check, submission

    folder = submission.find(runs_root(runs), run)
    submission.check_ended(folder)

    def look(plan: Plan) -> None:
        advise(plan)
        if why := resume_check.check(plan, folder):
            fact = f"the model could not be compared with the checkpoint here ({why})"
            click.echo(f"note: {fact}; the first attempt compares them", err=True)

    measured = earlier_runs.measured(folder)
    plan = prepare.again(folder, flags(given), os.environ, look, measured)
    job_id = submission.submit(plan, folder)
    announce(folder, job_id, as_json=as_json, parsable=False)
    if not (plan.backend == "local" if follow is None else follow):
        return 0
    from hpcddp.cli.follow import follow_run

    return follow_run(folder, as_json=as_json)
