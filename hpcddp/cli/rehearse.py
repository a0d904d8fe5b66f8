"""`hpcddp rehearse`: a job's faults before it meets them, on a Slurm of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import F, JobCommand, complete_jobs, flags, job_options, json_option
from hpcddp.planning import jobfile

if TYPE_CHECKING:
    from hpcddp.sandbox.outcome import FaultOutcome, Report

FAULTS = {
    "preempt": "Preemptions: a job of higher priority wants the nodes.",
    "kill-node": "Nodes that die, with all that runs on them.",
    "timeout": "Ends of the time limit.",
    "crash": "Ranks that are killed.",
    "hang": "Ranks that stand still.",
    "cancel": "Cancellations: it must stay ended until it is resumed.",
}


def fault_options(function: F) -> F:
    """An option for each kind of fault."""
    for kind, text in reversed(FAULTS.items()):
        option = click.option(f"--{kind}", metavar="N", type=int, default=0, help=text)
        function = option(function)
    return function


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@fault_options
@click.option("--seed", type=int, help="Of the instants.  [default: a new one, which is shown]")
@click.option("--watch", type=float, default=10.0, show_default=True, metavar="SECONDS",
              help="How long a cancelled run must stay so.")  # fmt: skip
@job_options
@click.option("--runs", metavar="FOLDER", help="Keep both runs there.")
@json_option
def rehearse(job: str | None, seed: int | None, watch: float, runs: str | None, as_json: bool,
             **given: Any) -> int:  # fmt: skip
    """Run JOB on a Slurm of its own, disturb it, and compare with an undisturbed run.

    It starts a sandbox for that and ends it again; it needs root and Slurm's packages. The exit
    code is 0 if JOB survived everything, with the same weights and the same order of samples, and
    lost no steps but those since the last checkpoint where a fault leaves no time to save.
    """
    from hpcddp.sandbox.rehearse import rehearse as play

    counts = {kind: given.pop(kind.replace("-", "_")) for kind in FAULTS}
    layers, notes = jobfile.load(job, flags(given), os.environ, Path.cwd())
    for note in notes:
        click.echo(f"note: {note}", err=True)
    report = play(
        layers, counts, int.from_bytes(os.urandom(4)) if seed is None else seed,
        say=lambda text: click.echo(text, err=True), folder=Path.cwd(),
        runs=Path(runs) if runs else None, watch=watch,
    )  # fmt: skip
    click.echo(json.dumps(report.to_dict()) if as_json else table(report))
    return 0 if report.passed else 1


COLUMNS = ("fault", "step", "attempt", "cause", "survived", "steps lost", "seconds lost")


def table(report: Report) -> str:
    """The report for a person."""
    rows = [COLUMNS, *(_cells(fault, clock=not report.steps) for fault in report.faults)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
             for row in rows]  # fmt: skip
    order = _yes(report.order_equal) + (f" ({report.difference})" if report.difference else "")
    needless = f" ({report.steps_needless} in vain)" if report.steps_needless else ""
    reason = f": {report.reason}" if report.reason else ""
    return "\n".join([
        *lines,
        f"the run is {report.state}{reason}",
        f"steps lost     {report.steps_lost} of {report.steps}{needless}",
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
        str(fault.steps_lost),
        "-" if fault.seconds_lost is None else f"{fault.seconds_lost:.1f}",
    )


def _yes(good: bool | None) -> str:
    return "-" if good is None else "yes" if good else "NO"
