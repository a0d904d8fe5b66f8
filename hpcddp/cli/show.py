"""`hpcddp render` and `hpcddp config`: the script of a job, and the sources of its values."""

from __future__ import annotations

import json
from typing import Any

import click

from hpcddp.cli.options import (
    JobCommand,
    complete_jobs,
    job_options,
    json_option,
    plan_job,
    plan_run,
    runs_option,
    runs_root,
)


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@job_options
@runs_option
def render(job: str | None, runs: str | None, **given: Any) -> None:
    """Print the script of JOB for plain sbatch; its run folder is made and named on stderr."""
    from hpcddp.submit import prepare

    given["cluster"] = given.get("cluster") or default_cluster()
    root = runs_root(runs)
    run = prepare.new_run(plan_run(job, given, root), root)
    click.echo(f"folder  {run.path}", err=True)
    click.echo(run.script.read_text(encoding="utf-8"), nl=False)


def default_cluster() -> str | None:
    """Slurm, whether or not sbatch is here, unless the environment names another cluster."""
    import os

    return None if os.environ.get("HPCDDP_CLUSTER") else "slurm"


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@job_options
@json_option
def config(job: str | None, as_json: bool, **given: Any) -> None:
    """Print each value of JOB and its source."""
    from hpcddp.spec import KEYS, to_dict

    plan = plan_job(job, given)
    values = KEYS.flatten(to_dict(plan.spec))
    rows = [(n, v, plan.sources.get(n, "default")) for n, v in values.items()]
    if as_json:
        keys = {n: {"value": v, "source": source} for n, v, source in rows}
        click.echo(json.dumps({"schema_version": 1, "keys": keys}))
        return
    texts = [(n, json.dumps(v, ensure_ascii=False), source) for n, v, source in rows]
    widths = [max(len(row[i]) for row in texts) for i in (0, 1)]
    for name, value, source in texts:
        click.echo(f"{name:{widths[0]}}  {value:{widths[1]}}  {source}")
