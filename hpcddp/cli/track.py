"""`hpcddp track`: a run at TensorBoard, MLflow or W&B."""

from __future__ import annotations

import time

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir
from hpcddp.trackers import TRACKERS, module, plain

PAUSE = 1.0  # seconds between two looks for what is new


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
    found = status.status(folder)
    if not found.final:
        _check_alone(folder, names)
    teller = Telling(folder, names)
    if follow and not found.final:
        try:
            found = wait(folder, teller.look)
        except KeyboardInterrupt:
            click.echo("the run goes on; the same command tells the rest", err=True)
    return teller.end(over=found.final)


class Telling:
    """The trackers, and who of them failed."""

    def __init__(self, run: RunDir, names: tuple[str, ...]) -> None:
        from hpcddp.trackers.send import Teller

        self.failed = 0
        self._next = 0.0
        self._teller = Teller(run, names, self._fail)

    def _fail(self, name: str, error: Exception) -> None:
        self.failed += 1
        click.echo(plain(f"error: {name}: {error}"), err=True)

    def look(self) -> None:
        """Tell what is new, from time to time."""
        if time.monotonic() > self._next:
            self._teller.tell()
            self._next = time.monotonic() + PAUSE

    def end(self, *, over: bool) -> int:
        """Tell the rest; the exit code."""
        self._teller.tell(over=over)
        self._teller.close()
        return 1 if self.failed else 0


def _check_alone(run: RunDir, names: tuple[str, ...]) -> None:
    """The run's own job must not tell the same tracker too: it would be told twice."""
    from hpcddp import record

    own = record.read(run).spec.get("metrics", {}).get("trackers", [])
    if both := [name for name in names if name in own]:
        raise UserError(
            f"its job tells {', '.join(both)} itself, and has not ended",
            where=run.name,
            hint="call this when it has ended, if there is something that it could not tell",
        )
