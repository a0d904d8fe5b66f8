"""`hpcddp rehearse`: a job with faults, on a sandbox of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import F, JobCommand, complete_jobs, flags, job_options, json_option
from hpcddp.cli.terminal import say, tables
from hpcddp.cli.terminal.sections import option
from hpcddp.planning import jobfile

if TYPE_CHECKING:
    from hpcddp.sandbox.outcome import FaultOutcome, Report

FAULTS = {
    "preempt": "Number of preemptions by a job of higher priority.",
    "kill-node": "Number of nodes that fail with all their processes.",
    "timeout": "Number of time limits that the job reaches.",
    "crash": "Number of ranks that are killed.",
    "hang": "Number of ranks that stop making progress.",
    "cancel": "Number of cancels, after which the run must stay ended until it is resumed.",
    "silent-node": "Number of nodes that are paused, as without network or power.",
    "kill-script": "Number of batch scripts that are killed.",
    "kill-head": "Number of nodes that fail while the batch script runs on them.",
}


def fault_options(function: F) -> F:
    """An option for each kind of fault."""
    for kind, text in reversed(FAULTS.items()):
        add = option("Faults", f"--{kind}", metavar="N", type=int, default=0, help=text)
        function = add(function)
    return function


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@fault_options
@option("Faults", "--seed", type=int, metavar="N",
        help="Random seed for the fault times.  [default: a new one each time]")  # fmt: skip
@option("Faults", "--two", metavar="N", type=int, default=0,
        help="Number of faults during which a rank is killed as well.")  # fmt: skip
@option("Faults", "--down", metavar="N", type=int, default=0,
        help="Number of lost nodes that return only once Slurm has them down.")  # fmt: skip
@option("Faults", "--watch", type=float, default=10.0, show_default=True, metavar="SECONDS",
        help="Time for which a cancelled run must stay ended.")  # fmt: skip
@job_options
@click.option(
    "--runs",
    metavar="FOLDER",
    help="Folder to keep both runs in.  [default: none; kept only after a failure]",
)
@json_option
def rehearse(job: str | None, seed: int | None, two: int, down: int, watch: float,
             runs: str | None, as_json: bool, **given: Any) -> int:  # fmt: skip
    """Test on a sandbox whether JOB survives faults.

    It runs JOB twice, without faults and with them, and compares both runs. The sandbox is a Slurm
    of its own, which needs root and Slurm's packages, and ends with the command.

    The exit code is 0 if JOB survived all faults, with the same weights and the same order of
    samples, and lost no steps except those since the last checkpoint at a fault that leaves no time
    to save.
    """
    from hpcddp.sandbox.rehearse import rehearse as play

    counts = {kind: given.pop(kind.replace("-", "_")) for kind in FAULTS}
    if idle := [f"--{name}" for name in UNUSED if given.get(name) is not None]:
        say.note(f"{', '.join(idle)}: no effect on the sandbox of the rehearsal")
    layers, notes = jobfile.load(job, flags(given), os.environ, Path.cwd())
    for note in notes:
        say.note(note)
    report = play(
        layers, counts, int.from_bytes(os.urandom(4)) if seed is None else seed,
        say=say.note if as_json else lambda text: click.echo(text, err=True), folder=Path.cwd(),
        runs=Path(runs) if runs else None, watch=watch, two=two, down=down,
    )  # fmt: skip
    click.echo(json.dumps(report.to_dict()) if as_json else table(report))
    return 0 if report.passed else 1


# Options of a job on a cluster: a command line of `submit` works here, but these have no effect.
UNUSED = ("time", "partition", "account", "qos", "constraint", "mem", "cluster")
for _param in rehearse.params:
    if isinstance(_param, click.Option):
        _param.hidden = _param.name in UNUSED
        _param.help = "Number of nodes." if _param.name == "nodes" else _param.help


COLUMNS = ("fault", "step", "attempt", "cause", "survived", "steps lost", "seconds lost")


def table(report: Report) -> str:
    """The report as a table."""
    rows = [COLUMNS, *(_cells(fault, clock=not report.steps) for fault in report.faults)]
    order = _yes(report.order_equal) + (f" ({report.difference})" if report.difference else "")
    needless = f" ({report.steps_needless} needlessly)" if report.steps_needless else ""
    reason = f": {report.reason}" if report.reason else ""
    known = report.steps_lost is not None
    lost = f"{report.steps_lost} of {report.steps}" if known else "unknown"
    again = f"in flight      {report.steps_repeated}, taken again" if report.steps_repeated else ""
    return "\n".join([
        *tables.table(rows),
        f"the run is {report.state}{reason}",
        f"steps lost     {lost}{needless}",
        *filter(None, [again]),
        f"weights equal  {_yes(report.weights_equal)}",
        f"order equal    {order}",
        f"seed           {report.seed}",
    ])  # fmt: skip


def _cells(fault: FaultOutcome, *, clock: bool) -> tuple[str, ...]:
    step = f"{fault.step / 10:.1f} s" if clock else str(fault.step)
    return (
        fault.fault,
        step if fault.step else "start",
        str(fault.attempt or "-"),
        fault.cause or "-",
        _yes(fault.survived) + (f": {fault.reason}" if fault.reason else ""),
        "-" if fault.steps_lost is None else str(fault.steps_lost),
        "-" if fault.seconds_lost is None else f"{fault.seconds_lost:.1f}",
    )


def _yes(good: bool | None) -> str:
    return "-" if good is None else "yes" if good else "NO"
