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
    job_options_except,
    json_option,
    runs_option,
    runs_root,
)
from hpcddp.cli.submit import announce, dry_run_option, follow_option, show
from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.sections import SectionCommand
from hpcddp.keys import toml_text

if TYPE_CHECKING:
    from hpcddp.planning.plan import Plan
    from hpcddp.rundir import RunDir

# Option -> why `resume` refuses it, and a hint.
REFUSED = {
    "--name": ("a run keeps its name", "leave --name out"),
    "--no-snapshot": ("a run keeps its copy of the code", "submit a new run with --no-snapshot"),
}


@click.command()
@click.argument("run", shell_complete=complete_runs)
@runs_option
@json_option
def stop(run: str, runs: str | None, as_json: bool) -> None:
    """Save a checkpoint of RUN at the next step, then end it. It is not requeued."""
    ask(run, runs, "stop", as_json)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@runs_option
@json_option
def preempt(run: str, runs: str | None, as_json: bool) -> None:
    """Save a checkpoint of RUN at the next step, then requeue it, as a preemption does."""
    ask(run, runs, "preempt", as_json)


@click.command()
@click.argument("run", shell_complete=complete_runs)
@runs_option
@json_option
def cancel(run: str, runs: str | None, as_json: bool) -> None:
    """End RUN at once, without a checkpoint."""
    ask(run, runs, "cancel", as_json)


def ask(token: str, runs: str | None, want: str, as_json: bool) -> None:
    """Send a request to a run, and print it."""
    from hpcddp.submit import submission

    run = submission.find(runs_root(runs), token)
    before = submission.request(run, want)
    if as_json:
        line = {"schema_version": 1, "run": run.name, "asked": want, "state": before.state}
        click.echo(json.dumps(line | {"job_id": before.job_id}))
    else:
        click.echo(f"{want} requested for {run.name} (was {before.state}, job {before.job_id})")


@click.command(cls=SectionCommand)
@click.argument("run", shell_complete=complete_runs)
@job_options_except(REFUSED)
@follow_option
@dry_run_option
@json_option
@runs_option
def resume(run: str, runs: str | None, follow: bool | None, dry_run: bool, as_json: bool,
           **given: Any) -> int:  # fmt: skip
    """Continue RUN, which has ended, from its newest checkpoint.

    Options change values of the job, such as the number of nodes. All other values stay.
    """
    from hpcddp import record
    from hpcddp.cli.terminal.follow import Tail, follow_run
    from hpcddp.submit import prepare, submission

    folder = submission.find(runs_root(runs), run)
    submission.check_ended(folder)
    plan, changes = _planned(folder, given)
    for name, (old, new) in changes.items() if not as_json else ():
        click.echo(f"change  {name}: {_shown(old)} -> {_shown(new)}")
    if dry_run:
        return show(plan, folder, as_json, run=folder.name, changes=changes)
    tail = Tail(folder, behind=True)
    prepare.renew(plan, folder, record.read(folder).created)
    job_id = submission.submit(plan, folder, note=say.note)
    announce(folder, job_id, as_json=as_json, parsable=False, changes=changes)
    if not (plan.backend == "local" if follow is None else follow):
        return 0
    return follow_run(folder, as_json=as_json, tail=tail)


def _shown(value: Any) -> str:
    """A value of a key for a person."""
    return "not set" if value is None else toml_text(value)


def _planned(run: RunDir, given: dict[str, Any]) -> tuple[Plan, dict[str, list[Any]]]:
    """The plan of a run's next attempt, checked against its checkpoint, and the changes.

    Returns:
        The plan; key -> its values before and after.
    """
    from hpcddp import record, spec
    from hpcddp.planning import earlier_runs
    from hpcddp.submit import prepare, resume_check

    job = record.read(run)
    before = spec.KEYS.flatten(job.spec)
    measured = earlier_runs.measured(run)
    plan = prepare.planned_again(run, flags(given), os.environ, measured)
    for text in plan.notes:
        say.note(text)
    advise(plan)
    if why := resume_check.check(plan, run):
        fact = f"the model could not be compared with the checkpoint here ({why})"
        say.note(f"{fact}; the next attempt compares them")
    after = spec.KEYS.flatten(spec.to_dict(plan.spec))
    if job.cluster == str(plan.profile.path):  # a name before, now the path of its profile
        after["cluster"] = before.get("cluster")
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return plan, {name: [before.get(name), after.get(name)] for name in names}
