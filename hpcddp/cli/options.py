"""Options that several commands share, and their results: layers of values, and a plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpcddp.errors import UserError
from hpcddp.planning import jobfile
from hpcddp.planning.jobfile import Layer

if TYPE_CHECKING:
    from hpcddp.planning.asked import Asked

F = TypeVar("F", bound=Callable[..., Any])  # a function that gets options

# Parameter -> the key it sets.
SHORTCUTS = {
    "nodes": "nodes",
    "gpus": "gpus",
    "strategy": "strategy",
    "name": "name",
    "cluster": "cluster",
    "launcher": "launcher",
    "template": "template",
    "time": "slurm.time",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
}
STARTERS = "srun, spawn, fork, mpi, torchrun, horovod, dask"  # to import the table takes time
# Parameter -> the prefix of the keys that its KEY=VALUE pairs set.
PAIRS = {"set": "", "sbatch": "slurm.", "env": "env."}

runs_option = click.option(
    "--runs", metavar="FOLDER", help="Folder of the runs.  [default: ./runs, or HPCDDP_RUNS]"
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def complete_runs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The runs that a word on the command line may become."""
    from hpcddp.rundir import runs_in

    names = [run.name for run in runs_in(runs_root(ctx.params.get("runs")))]
    return [name for name in [*names, "last"] if name.startswith(begun)]


def complete_jobs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The jobs of ./jobs and the shipped ones."""
    return sorted(n for n in jobfile.known(Path.cwd()) if n.startswith(begun))


class JobCommand(click.Command):
    """A command on a job, which may be any program: all that comes after the first ``--``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the program off before click reads the rest: none of its words is our option."""
        words: list[str] = []
        if "--" in args:
            split = args.index("--")
            args, words = args[:split], args[split + 1 :]
            if not words:
                raise click.UsageError("there is no command after --", ctx)
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            if not words and any(map(jobfile.is_program, given)):
                message = f"{error.format_message()}\n  {jobfile.PROGRAM}"
                raise click.UsageError(message, ctx) from None
            raise
        ctx.params["command"] = tuple(words)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The pieces of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def job_options(function: F) -> F:
    """The options that change a job."""
    for option in reversed(
        (
            click.option("-N", "--nodes", metavar="N", help="Nodes: a number, or a range as 1-4."),
            click.option("--gpus", metavar="G", help="GPUs of one node."),
            click.option(
                "--strategy", metavar="S", help="How the model is spread: ddp, fsdp, pp=2,ddp=4."
            ),
            click.option("-t", "--time", metavar="TIME", help="Time limit, in Slurm's forms."),
            click.option("-p", "--partition", metavar="NAME", help="Slurm partition."),
            click.option("-A", "--account", metavar="NAME", help="Slurm account."),
            click.option("-q", "--qos", metavar="NAME", help="Slurm quality of service."),
            click.option("-J", "--name", metavar="NAME", help="Name of the run."),
            click.option("--cluster", metavar="C", help="auto, local, slurm, or a profile."),
            click.option("--set", multiple=True, metavar="K=V", help="Set any key of the job."),
            click.option("--sbatch", multiple=True, metavar="KEY=VALUE", help="Any sbatch option."),
            click.option("--env", multiple=True, metavar="NAME=VALUE", help="Job environment."),
            click.option("--launcher", metavar="L", help=f"How processes start: {STARTERS}."),
            click.option(
                "--no-snapshot", is_flag=True, help="Work in the folder itself, uncopied."
            ),
            click.option("--template", metavar="FILE", help="Script template of your own."),
        )
    ):
        function = option(function)
    return function


def pairs(flag: str, words: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as a table."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"{word!r} is not KEY=VALUE", where=flag)
        values[name] = value
    return values


def flags(given: dict[str, Any]) -> Layer:
    """The layer of the flags that were given; the others set nothing."""
    layer = Layer()
    if given.get("command"):
        layer.put("command", list(given["command"]), "command line")
    if given.get("no_snapshot"):
        layer.put("snapshot", False, "--no-snapshot")
    for parameter, prefix in PAIRS.items():
        flag = f"--{parameter}"
        for name, text in pairs(flag, given.get(parameter) or ()).items():
            layer.put(prefix + name, text, flag, text=True)
    for parameter, name in SHORTCUTS.items():
        if given.get(parameter) is not None:
            layer.put(name, given[parameter], f"--{parameter}", text=name == "gpus")
    if given.get("start_from"):
        layer.put("start_from", given["start_from"], "command line")
    return layer


def runs_root(runs: str | None) -> Path:
    """The folder of the runs."""
    return Path(runs or os.environ.get("HPCDDP_RUNS") or "runs").absolute()


def ask(job: str | None, given: dict[str, Any]) -> Asked:
    """What is asked of a job with the flags that were given."""
    from hpcddp.planning.asked import Asked

    layers, notes = jobfile.load(job, flags(given), os.environ, Path.cwd())
    return Asked.read(layers, notes, os.environ)


def plan_asked(asked: Asked, **known: Any) -> Any:
    """The checked plan of what is asked, with what is known beside it; notes go to stderr."""
    from hpcddp.planning import plan

    checked = plan.make(asked, environ=os.environ, folder=Path.cwd(), **known)
    for note in checked.notes:
        click.echo(f"note: {note}", err=True)
    return checked


def plan_job(job: str | None, given: dict[str, Any]) -> Any:
    """The checked plan of a job with the flags that were given."""
    return plan_asked(ask(job, given))


def advise(plan: Any) -> None:
    """Print to stderr the time that a preemption leaves, and warnings about a plan. Both use the
    times of an earlier run."""
    from hpcddp.planning import advice

    warnings = advice.advise(plan)
    if plan.site and (text := advice.room(plan.site, plan.measured)):
        click.echo(f"note: {text}", err=True)
    for text in warnings:
        click.echo(f"warning: {text}", err=True)


def plan_run(job: str | None, given: dict[str, Any], root: Path) -> Any:
    """The checked plan of a new run below a folder, with advice from the job's earlier runs."""
    from hpcddp.planning import earlier_runs

    asked = ask(job, given)
    measured = earlier_runs.of_job(asked.spec.name, asked.backend, root)
    plan = plan_asked(asked, measured=measured, runs=root)
    if plan.code:
        from hpcddp.planning import code_checks

        for path in code_checks.bypassed(plan.code, plan.spec.command):
            click.echo(f"warning: the job reads {path} where it lies, not from its copy", err=True)
    advise(plan)
    return plan
