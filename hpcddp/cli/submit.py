"""`hpcddp submit`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import (
    JOB,
    OUTPUT,
    JobCommand,
    complete_jobs,
    job_options_except,
    json_option,
    plan_run,
    runs_option,
    runs_root,
)
from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.sections import F, option
from hpcddp.sizes import counted

if TYPE_CHECKING:
    from hpcddp.planning.plan import Plan
    from hpcddp.rundir import RunDir

SCHEMA_VERSION = 1
FOLLOW = "Follow the log until the run ends, or return.  [default: detach on Slurm, else follow]"

follow_option = option(OUTPUT, "--follow/--detach", default=None, help=FOLLOW)
dry_run_option = option(
    OUTPUT, "--dry-run", is_flag=True,
    help="Print script, rank map and Slurm's verdict; change and submit nothing.",
)  # fmt: skip


def submit_options(refused: Mapping[str, tuple[str, str]]) -> Callable[[F], F]:
    """Add the options of a command that submits a job, without those that it refuses."""

    def add(function: F) -> F:
        for decorator in reversed((
            job_options_except(refused),
            follow_option,
            dry_run_option,
            option(OUTPUT, "--parsable", is_flag=True, help="Print only the job id."),
            json_option,
            runs_option,
        )):  # fmt: skip
            function = decorator(function)
        return function

    return add


EXAMPLES = """\b
hpcddp submit mine --nodes 2 --gpus 4 --set train.lr=3e-4
hpcddp submit --nodes 2 --gpus 4 -p gpu -t 2:00:00 -- python train.py --lr 0.1
"""


@click.command(cls=JobCommand, epilog=EXAMPLES)
@click.argument("job", required=False, shell_complete=complete_jobs)
@submit_options({})
@option(JOB, "--show-snapshot", is_flag=True, help="List the files to be copied; submit nothing.")
def submit(job: str | None, runs: str | None, show_snapshot: bool, **given: Any) -> int:
    """Submit JOB to Slurm, or run it on this machine if Slurm is not found.

    JOB is the name of a job file in ./jobs or of a shipped job, a path, or package.module:object.
    The default is the only job file in ./jobs, or else the shipped job `digits`.

    To run a program of your own, write it after --: each rank runs that command.
    """
    plan = plan_run(job, given, runs_root(runs, new=True))
    return list_code(plan, given["as_json"]) if show_snapshot else carry_out(plan, runs, **given)


def carry_out(plan: Plan, runs: str | None, *, follow: bool | None, dry_run: bool, parsable: bool,
              as_json: bool, **given: Any) -> int:  # fmt: skip
    """Submit a plan as the options say; the plan holds those in `given`."""
    from hpcddp.planning import advice
    from hpcddp.rundir import RunDir, new_id
    from hpcddp.submit import prepare, submission

    root = runs_root(runs, new=True)
    if dry_run:
        return show(plan, RunDir(root / new_id(plan.spec.name)), as_json)
    if plan.start_note:
        note_local(plan.start_note)
    note_hours(plan, advice.gpu_hours(plan))
    run = prepare.new_run(plan, root)
    job_id = submission.submit(plan, run, new=True, note=say.note)
    announce(run, job_id, as_json=as_json, parsable=parsable)
    if follow is None:
        follow = plan.backend == "local" and not parsable
    if not follow:
        return 0
    from hpcddp.cli.terminal.follow import follow_run

    return follow_run(run, as_json=as_json)


def note_local(start_note: str) -> None:
    """Print that the job runs on this machine, and how a sandbox would be used if one is up."""
    from hpcddp.sandbox import shell

    say.note(start_note)
    if text := shell.reminder(os.environ):
        say.note(text)


def announce(run: RunDir, job_id: str, *, as_json: bool, parsable: bool, **more: Any) -> None:
    """Print the run's folder and the next commands.

    Args:
        more: further facts for the JSON.
    """
    if as_json:
        facts = {"schema_version": SCHEMA_VERSION, "run": run.name, "job_id": job_id}
        click.echo(json.dumps({**facts, "path": str(run.path), **more}))
        say.release()
        sys.stdout.flush()
    elif parsable:
        click.echo(job_id)
    else:
        click.echo(f"run     {run.name}\njob     {job_id}\nfolder  {run.path}\nlog     {run.log}")
        click.echo(f"next    hpcddp status {run.name}\n        hpcddp logs -f {run.name}")
        click.echo(f"        hpcddp stop {run.name}")
        note_waiting(run)


def note_waiting(run: RunDir) -> None:
    """Print when Slurm expects to start the run, if it says so, or why it never will, where it has
    accepted such a job."""
    from hpcddp import record
    from hpcddp.slurm import pending_reasons
    from hpcddp.submit import times
    from hpcddp.submit.status import status

    if record.read(run).backend != "slurm":
        return
    now = status(run)
    if now.state == "PENDING" and pending_reasons.never(now.reason):
        say.note(f"{run.name} is PENDING: {now.reason}")
    elif now.expected:
        say.note(f"Slurm expects to start it at {times.shown(now.expected)}")


def list_code(plan: Plan, as_json: bool) -> int:
    """Print the files to be copied into a command's working folder."""
    from hpcddp.planning import code_files

    if as_json:
        facts: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "files": {}, "links": {}}
        if plan.code:
            facts["files"] = {str(path): size for path, size in sorted(plan.code.files.items())}
            facts["links"] = {str(path): str(to) for path, to in sorted(plan.code.links.items())}
        click.echo(json.dumps(facts))
        return 0
    for line in code_files.rows(plan.code) if plan.code else ():
        click.echo(line)
    if not plan.code:
        say.note("nothing is copied: the job works in the current folder")
    return 0


def show(plan: Plan, folder: RunDir, as_json: bool, **more: Any) -> int:
    """The dry run: script, rank map, and Slurm's verdict.

    Args:
        more: further facts for the JSON.
    """
    from hpcddp.cli import ranks
    from hpcddp.planning import advice
    from hpcddp.planning.site import profile_check
    from hpcddp.slurm import sbatch

    text = plan.render(folder, plan.worker_command(folder))
    if not as_json:
        click.echo(text)
        click.echo("".join(ranks.table(plan.topology, mesh=plan.layout)), nl=False)
    on_slurm, hours = plan.backend == "slurm", advice.gpu_hours(plan)
    accepted, answer = sbatch.verdict(text) if on_slurm else (True, "")
    if as_json:
        facts = ranks.facts(plan.topology, mesh=plan.layout, gpus=plan.gpus)
        facts |= {"backend": plan.backend, "script": text}
        facts["gpu_hours"] = hours if math.isfinite(hours) else None
        facts["verdict"] = {"accepted": accepted, "message": answer} if on_slurm else None
        click.echo(json.dumps({**facts, **more}))
    elif on_slurm:
        word = "accepted" if accepted else "refused"
        click.echo(f"sbatch --test-only: {word}: {answer}", err=True)
        if not accepted and profile_check.refuses_memory(plan, folder):
            say.note("sbatch accepts the job without --mem, which hpcddp added: `hpcddp submit` "
                     "leaves it out then")  # fmt: skip
        note_hours(plan, hours)
    return 0 if accepted else 1


def note_hours(plan: Plan, hours: float) -> None:
    """Print what an attempt may use, where it has a time limit."""
    if plan.backend == "slurm" and 0 < hours < math.inf:
        gpus = counted(plan.allocated.max * plan.gpus, "GPU")
        amount = f"{hours:.4g} GPU hour" + ("" if hours == 1 else "s")
        say.note(f"an attempt uses up to {amount}, of {gpus}")
