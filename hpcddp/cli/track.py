"""`hpcddp track`: a run at TensorBoard, MLflow or W&B."""

from __future__ import annotations

import time

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir
from hpcddp.trackers import TRACKERS, module, plain

PAUSE = 1.0  # seconds between two looks for new metrics


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option(
    "--to", "names", multiple=True, required=True, type=click.Choice(list(TRACKERS)),
    help="Who is told; may be given several times.",
)  # fmt: skip
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@runs_option
def track(run: str, names: tuple[str, ...], follow: bool, runs: str | None) -> int:
    """Tell trackers of RUN what they do not know yet, from what lies in its folder.

    Works beside the run and afterwards, as often as one likes, and where the job's nodes have no
    network. TensorBoard's files lie in RUN/tensorboard, those of W&B in RUN/wandb if there is no
    key for it, those of MLflow beside the runs if MLFLOW_TRACKING_URI is not set.
    """
    from hpcddp.cli.follow import wait
    from hpcddp.submit import status, submission

    folder = submission.find(runs_root(runs), run)
    for name in names:
        module(name)  # or an error that says what to install
    state = status.status(folder)
    if not state.final:
        _check_alone(folder, names)
    sending = Sending(folder, names)
    if follow and not state.final:
        try:
            state = wait(folder, sending.look)
        except KeyboardInterrupt:
            click.echo("the run goes on; the same command tells the rest", err=True)
    return sending.end(over=state.final)


class Sending:
    """The trackers, and how many of them failed."""

    def __init__(self, run: RunDir, names: tuple[str, ...]) -> None:
        from hpcddp.trackers.send import Sender

        self.failed = 0
        self._next = 0.0
        self._sender = Sender(run, names, self._fail)

    def _fail(self, name: str, error: Exception) -> None:
        self.failed += 1
        click.echo(plain(f"error: {name}: {error}"), err=True)

    def look(self) -> None:
        """Send the new metrics, from time to time."""
        if time.monotonic() > self._next:
            self._sender.send()
            self._next = time.monotonic() + PAUSE

    def end(self, *, over: bool) -> int:
        """Send the rest; the exit code."""
        self._sender.send(over=over)
        self._sender.close()
        return 1 if self.failed else 0


def _check_alone(run: RunDir, names: tuple[str, ...]) -> None:
    """Refuse a tracker that the run's own job sends to: it would get each step twice."""
    from hpcddp import record

    own = record.read(run).spec.get("metrics", {}).get("trackers", [])
    if both := [name for name in names if name in own]:
        raise UserError(
            f"its job tells {', '.join(both)} itself, and has not ended",
            where=run.name,
            hint="call this when it has ended, if there is something that it could not tell",
        )
