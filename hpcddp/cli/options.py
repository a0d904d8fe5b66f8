"""Options that several commands share, and their results: layers of values, and a plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli import completion
from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.sections import F as F
from hpcddp.cli.terminal.sections import SectionCommand, option
from hpcddp.errors import UserError
from hpcddp.planning import jobfile
from hpcddp.planning.jobfile import Layer

if TYPE_CHECKING:
    from hpcddp.planning.asked import Asked

# Parameter -> the key it sets.
SHORTCUTS = {
    **{
        name: name
        for name in ("nodes", "spares", "strategy", "name", "cluster", "launcher", "template")
    },
    "time": "slurm.time",
    "partition": "slurm.partition",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "mem": "slurm.mem",
}
STARTERS = "srun, spawn, fork, mpi, torchrun, horovod, dask"  # to import the table takes time
# Parameter -> the prefix of the keys that its KEY=VALUE pairs set.
PAIRS = {"set": "", "sbatch": "slurm.", "env": "env."}

RESOURCES, SLURM, JOB, OUTPUT = "Resources", "Slurm", "Job", "Output"  # sections of the help
Settings = dict[str, Any]  # of an option
STRATEGY: Settings = {"metavar": "STRATEGY", "shell_complete": completion.strategies}
CLUSTER: Settings = {"metavar": "CLUSTER", "shell_complete": completion.clusters,
                     "help": "Cluster profile: auto, local, slurm, a name or a file."}  # fmt: skip
SET: Settings = {"metavar": "KEY=VALUE", "multiple": True, "shell_complete": completion.settings,
                 "help": "Value of a key of the job: train.lr=3e-4.  [repeatable]"}  # fmt: skip
# The options that change a job: section of the help, names, settings.
JOB_OPTIONS: tuple[tuple[str, tuple[str, ...], Settings], ...] = (
    (RESOURCES, ("-N", "--nodes"),
     {"metavar": "N", "help": "Number of nodes, or a range such as 1-4."}),
    (RESOURCES, ("--spares",), {"metavar": "N", "type": int, "help": "More nodes, for lost ones."}),
    (RESOURCES, ("--gpus",), {"metavar": "GPUS", "help": "GPUs per node: 4, or a100:4."}),
    (RESOURCES, ("-G", "--total-gpus"),
     {"metavar": "GPUS", "help": "GPUs of the whole job, in place of --gpus."}),
    (RESOURCES, ("--procs",),
     {"metavar": "N", "help": "Processes per node, on CPUs, in place of --gpus."}),
    (RESOURCES, ("--mem",), {"metavar": "SIZE", "help": "Memory per node, such as 64G."}),
    (RESOURCES, ("-t", "--time"),
     {"metavar": "TIME", "help": "Time limit, such as 30 (minutes), 1:30:00 or 2-12:00:00."}),
    (SLURM, ("-p", "--partition"), {"metavar": "NAME", "help": "Slurm partition."}),
    (SLURM, ("-A", "--account"), {"metavar": "NAME", "help": "Slurm account."}),
    (SLURM, ("-q", "--qos"), {"metavar": "NAME", "help": "Slurm quality of service."}),
    (SLURM, ("-C", "--constraint"), {"metavar": "NAME", "help": "Features of the nodes."}),
    (SLURM, ("--sbatch",), {"metavar": "KEY=VALUE", "multiple": True,
     "help": "Option of sbatch by its long name: mem=64G.  [repeatable]"}),
    (SLURM, ("--cluster",), CLUSTER),
    (JOB, ("-J", "--name"), {"metavar": "NAME", "help": "Name of the run."}),
    (JOB, ("--strategy",),
     {**STRATEGY, "help": "How the model is spread: ddp, fsdp, pp=2,ddp=4, ..."}),
    (JOB, ("--set",), SET),
    (JOB, ("--env",), {"metavar": "KEY=VALUE", "multiple": True,
     "help": "Environment variable of the job.  [repeatable]"}),
    (JOB, ("--launcher",), {"metavar": "LAUNCHER", "shell_complete": completion.launchers,
     "help": f"How processes start: {STARTERS}."}),
    (JOB, ("--template",), {"metavar": "FILE", "help": "Script template."}),
    (JOB, ("--no-snapshot",),
     {"is_flag": True, "help": "Work in the current folder, without a copy of the code."}),
)  # fmt: skip

runs_option = option(
    OUTPUT, "--runs", metavar="FOLDER",
    help="Folder of the runs.  [default: HPCDDP_RUNS, or ./runs]",
)  # fmt: skip
json_option = option(OUTPUT, "--json", "as_json", is_flag=True, help="Print JSON.")


def complete_runs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """Runs whose name begins with a word."""
    from hpcddp.rundir import runs_in

    names = [run.name for run in runs_in(_root(ctx.params.get("runs")))]
    return [name for name in [*names, "last"] if name.startswith(begun)]


def complete_jobs(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The jobs of ./jobs and the shipped ones."""
    return sorted(n for n in jobfile.known(Path.cwd()) if n.startswith(begun))


class JobCommand(SectionCommand):
    """A command on a job. The job may be a program of the user: the words after the first --."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Remove the program before click reads the options: its words are not options of ours."""
        words: list[str] = []
        if "--" in args:
            split = args.index("--")
            args, words = args[:split], args[split + 1 :]
            if not words:
                raise click.UsageError(f"no command after --\n{jobfile.PROGRAM}", ctx)
        given = list(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            if not words and any(map(jobfile.is_program, given)):
                known = isinstance(error, click.NoSuchOption)  # its guesses are of no use here
                message = error.message if known else error.format_message()
                message += f"\n{jobfile.PROGRAM}"
                raise click.UsageError(message, ctx) from None
            raise
        ctx.params["command"] = tuple(words)
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The pieces of the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def job_options(function: F) -> F:
    """Add the options that change a job."""
    return job_options_except({})(function)


def job_options_except(refused: Mapping[str, tuple[str, str]]) -> Callable[[F], F]:
    """Add the options that change a job. Those that the command refuses are not in its help.

    Args:
        refused: the name of an option -> why it is refused, and a hint.
    """

    def add(function: F) -> F:
        for section, names, settings in reversed(JOB_OPTIONS):
            if reason := refused.get(names[-1]):
                hidden = {**settings, "hidden": True, "expose_value": False}
                function = click.option(*names, **hidden, callback=_refusal(*reason))(function)
            else:
                function = option(section, *names, **settings)(function)
        return function

    return add


def _refusal(what: str, hint: str) -> Callable[[click.Context, click.Parameter, Any], None]:
    """A callback that refuses an option if it is given."""

    def refuse(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False, ()):
            raise UserError(what, where=parameter.opts[-1], hint=hint)

    return refuse


def pairs(where: str, words: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as a table."""
    values = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UserError(f"expected KEY=VALUE, got {word!r}", where=where)
        values[name] = value
    return values


def flags(given: dict[str, Any]) -> Layer:
    """The layer of the options that were given."""
    layer = Layer(line=tuple(sys.argv[1:]))
    if given.get("command"):
        layer.put("command", list(given["command"]), "command line")
    if given.get("no_snapshot"):
        layer.put("snapshot", False, "--no-snapshot")
    for parameter, prefix in PAIRS.items():
        where = f"--{parameter}"
        for name, text in pairs(where, given.get(parameter) or ()).items():
            layer.put(prefix + name, text, where, text=True)
    for parameter, name in SHORTCUTS.items():
        if given.get(parameter) is not None:
            layer.put(name, given[parameter], f"--{parameter}")
    _put_size(layer, given)
    if given.get("start_from"):
        layer.put("start_from", given["start_from"], "command line")
    return layer


def _put_size(layer: Layer, given: dict[str, Any]) -> None:
    """Add the processes of a node or of the job: one of three options says how many."""
    asked = [(n, given[n]) for n in ("gpus", "total_gpus", "procs") if given.get(n) is not None]
    options = [f"--{name.replace('_', '-')}" for name, _ in asked]
    if len(asked) > 1:
        hint = "--gpus and --procs count per node, --total-gpus those of the whole job"
        raise UserError(f"conflicts with {options[1]}", where=options[0], hint=hint)
    for (name, text), where in zip(asked, options, strict=True):
        kind, _, number = str(text).rpartition(":")
        if number == "0":
            raise UserError("must be at least 1", where=where, hint="use --procs N for CPUs")
        layer.put("device", "cpu" if name == "procs" else "auto", where)
        if kind:
            layer.put("gpu_type", kind, where)
        layer.put("gpus" if name == "procs" else name, number, where, text=True)


def runs_root(runs: str | None, *, new: bool = False) -> Path:
    """The folder of the runs.

    Args:
        new: for a command that makes a run, and the folder if it is missing.

    Raises:
        UserError: it is no folder, or --runs names one that is missing.
    """
    root = _root(runs)
    hint = "name the folder of the runs with --runs or HPCDDP_RUNS"
    try:
        is_there, is_folder = root.exists(), root.is_dir()
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
        raise UserError(what, where=str(root), hint=hint) from None
    if not is_folder and (is_there or (runs and not new)):
        raise UserError(
            "not a folder" if is_there else "no such folder", where=str(root), hint=hint
        )
    return root


def _root(runs: str | None) -> Path:
    return Path(runs or os.environ.get("HPCDDP_RUNS") or "runs").absolute()


def ask(job: str | None, given: dict[str, Any], auto: str = "") -> Asked:
    """The values of a job with the given options.

    Args:
        auto: the cluster of a job that names none.
    """
    from hpcddp.planning.asked import Asked

    layers, notes = jobfile.load(job, flags(given), os.environ, Path.cwd())
    if auto and jobfile.merge(layers)[0].cluster == "auto":
        layers[0].put("cluster", auto, "default")
    return Asked.read(layers, notes, os.environ)


def plan_asked(asked: Asked, **known: Any) -> Any:
    """The checked plan of a job; its notes and warnings go to stderr."""
    from hpcddp.planning import plan

    checked = plan.make(asked, environ=os.environ, folder=Path.cwd(), **known)
    for note in checked.notes:
        say.note(note)
    for text in checked.warnings:
        say.warning(text)
    return checked


def plan_job(job: str | None, given: dict[str, Any]) -> Any:
    """The checked plan of a job with the given options."""
    return plan_asked(ask(job, given))


def advise(plan: Any) -> None:
    """Print how long a preemption leaves, and the warnings about a plan. Both use the times of an
    earlier run."""
    from hpcddp.planning import advice

    warnings = advice.advise(plan)
    if plan.site and (text := advice.room(plan.site, plan.measured)):
        say.note(text)
    for text in warnings:
        say.warning(text)


def plan_run(job: str | None, given: dict[str, Any], root: Path, auto: str = "") -> Any:
    """The checked plan of a new run in a folder, with advice from earlier runs of the job.

    Args:
        auto: the cluster of a job that names none.
    """
    from hpcddp.planning import earlier_runs

    asked = ask(job, given, auto)
    measured = earlier_runs.of_job(asked.spec.name, asked.backend, root)
    plan = plan_asked(asked, measured=measured, runs=root)
    if plan.code:
        from hpcddp.planning.project import code_checks

        for path in code_checks.bypassed(plan.code, plan.spec.command):
            say.warning(f"the job reads {path} itself, not the copy in its run folder")
    advise(plan)
    return plan
