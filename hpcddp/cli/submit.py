"""`hpcddp submit`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import (
    F,
    JobCommand,
    complete_jobs,
    job_options,
    json_option,
    plan_run,
    runs_option,
    runs_root,
)

if TYPE_CHECKING:
    from hpcddp.planning.plan import Plan
    from hpcddp.rundir import RunDir


FOLLOW = "Show the log to the end, or return at once.  [default: return on Slurm, follow here]"


def submit_options(function: F) -> F:
    """The options of a command that submits a job."""
    for option in reversed((
        job_options,
        runs_option,
        click.option("--follow/--detach", default=None, help=FOLLOW),
        click.option("--dry-run", is_flag=True, help="Show script and rank map; submit nothing."),
        click.option("--parsable", is_flag=True, help="Print the job id alone."),
        json_option,
    )):  # fmt: skip
        function = option(function)
    return function


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@submit_options
@click.option("--show-snapshot", is_flag=True, help="List what of the code would be copied.")
def submit(job: str | None, runs: str | None, show_snapshot: bool, **given: Any) -> int:
    """Submit JOB, or train here where there is no Slurm.

    JOB is the name of a job file in ./jobs or of a shipped job, a path, or package.module:object.
    Without JOB the only one in ./jobs is taken. After -- comes a program of your own, which each
    rank runs as it stands: hpcddp submit --nodes 2 --gpus 4 -- python train.py --lr 0.1
    """
    plan = plan_run(job, given, runs_root(runs))
    return list_code(plan) if show_snapshot else carry_out(plan, runs, **given)


def carry_out(plan: Plan, runs: str | None, *, follow: bool | None, dry_run: bool, parsable: bool,
              as_json: bool, **given: Any) -> int:  # fmt: skip
    """Submit a plan as the options say; the plan holds those in `given`."""
    from hpcddp.submit import prepare, submission

    if dry_run:
        return show(plan, runs)
    run = prepare.new_run(plan, runs_root(runs))
    job_id = submission.submit(plan, run)
    announce(run, job_id, as_json=as_json, parsable=parsable)
    if follow is None:
        follow = plan.backend == "local" and not parsable
    if not follow:
        return 0
    from hpcddp.cli.follow import follow_run

    return follow_run(run, as_json=as_json)


def announce(run: RunDir, job_id: str, *, as_json: bool, parsable: bool) -> None:
    """Print the run's folder and the next commands."""
    if as_json:
        line = {"run": run.name, "job_id": job_id, "path": str(run.path)}
        click.echo(json.dumps(line))
        sys.stdout.flush()
    elif parsable:
        click.echo(job_id)
    else:
        click.echo(f"run     {run.name}\njob     {job_id}\nfolder  {run.path}\nlog     {run.log}")
        click.echo(f"next    hpcddp status {run.name}\n        hpcddp logs -f {run.name}")
        click.echo(f"        hpcddp stop {run.name}")


def list_code(plan: Plan) -> int:
    """Print the files that would be copied into a command's working folder."""
    from hpcddp.planning import code_files

    for line in code_files.rows(plan.code) if plan.code else ():
        click.echo(line)
    if not plan.code:
        click.echo("nothing is copied: the job works in the folder itself", err=True)
    return 0


def show(plan: Plan, runs: str | None) -> int:
    """The dry run: script, map, and Slurm's verdict."""
    from hpcddp.cli.ranks import table
    from hpcddp.rundir import RunDir, new_id
    from hpcddp.slurm import sbatch

    run = RunDir(runs_root(runs) / new_id(plan.spec.name))
    text = plan.render(run, plan.worker_command(run))
    click.echo(text)
    click.echo("".join(table(plan.topology, mesh=plan.layout)), nl=False)
    if plan.backend != "slurm":
        return 0
    accepted, words = sbatch.verdict(text)
    click.echo(f"sbatch --test-only: {'accepted' if accepted else 'refused'}: {words}", err=True)
    return 0 if accepted else 1
