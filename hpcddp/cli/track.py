"""`hpcddp track`: send the metrics of a run to TensorBoard, MLflow or Weights & Biases."""

from __future__ import annotations

import sys
import time

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root
from hpcddp.cli.terminal import say
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir
from hpcddp.trackers import TRACKERS, module, plain

PAUSE = 1.0  # seconds between two reads of the metrics


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--to", "names", multiple=True, required=True, type=click.Choice(list(TRACKERS)),
    help="Tracker.  [repeatable]",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Follow the run until it ends.")
@runs_option
def track(run: str, names: tuple[str, ...], follow: bool, runs: str | None) -> int:
    """Send metrics of RUN that were not sent yet to trackers, from the run folder.

    It works while the job runs and afterwards, any number of times, and also if the job's nodes
    have no network. TensorBoard's files are in RUN/tensorboard. Without an API key those of W&B are
    in RUN/wandb. Without MLFLOW_TRACKING_URI those of MLflow are in the folder of the runs.
    """
    from hpcddp.cli.terminal.follow import wait
    from hpcddp.submit import status, submission

    folder = submission.find(runs_root(runs), run)
    for name in names:
        module(name)  # raises an error that names the missing package
    state = status.status(folder)
    if not state.final:
        _check_alone(folder, names)
    sending = Sending(folder, names)
    if follow and not state.final:
        try:
            state = wait(folder, sending.look)
        except KeyboardInterrupt:
            say.note("the run continues; the same command sends the rest")
    return sending.end(over=state.final)


class Sending:
    """The trackers that get metrics, and how many of them failed."""

    def __init__(self, run: RunDir, names: tuple[str, ...]) -> None:
        from hpcddp.trackers.send import Sender

        self.failed = 0
        self._next = 0.0
        self._sender = Sender(run, names, self._fail)

    def _fail(self, name: str, error: Exception) -> None:
        self.failed += 1
        label = say.paint("error:", "red", sys.stderr)
        click.echo(f"{label} {plain(f'{name}: {error}')}", err=True)

    def look(self) -> None:
        """Send the new metrics, at most once per PAUSE."""
        if time.monotonic() > self._next:
            self._sender.send()
            self._next = time.monotonic() + PAUSE

    def end(self, *, over: bool) -> int:
        """Send the remaining metrics; the exit code."""
        self._sender.send(over=over)
        self._sender.close()
        for line in self._sender.outcomes():
            click.echo(line, err=True)
        return 1 if self.failed else 0


def _check_alone(run: RunDir, names: tuple[str, ...]) -> None:
    """Refuse a tracker that the job itself sends to: it would get each step twice."""
    from hpcddp import record

    own = record.read(run).spec.get("metrics", {}).get("trackers", [])
    if both := [name for name in names if name in own]:
        raise UserError(
            f"the job has not ended, and sends to {', '.join(both)} itself",
            where=run.name,
            hint="wait for its end; this command then sends only unsent metrics",
        )
