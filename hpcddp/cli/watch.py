"""`hpcddp watch`: a run live in the terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root

if TYPE_CHECKING:
    from rich.console import Console

    from hpcddp.cli.terminal.screen import Screen
    from hpcddp.observe.view import View
    from hpcddp.observe.viewer import Viewer
    from hpcddp.rundir import RunDir

POINTS = 800  # of a curve: two for each column of dots of a wide terminal
HINT = "q quits"
READ = 0.3  # seconds for reading old metrics between two pictures
PAGE = (80, 40)  # columns and lines without a terminal


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option(
    "--every", metavar="SECONDS", default=1.0, show_default=True,
    type=click.FloatRange(0.1, 3600), help="Time between two readings of the run folder.",
)  # fmt: skip
@click.option("--once", is_flag=True, help="Print one picture and exit.")
@runs_option
def watch(run: str, every: float, once: bool, runs: str | None) -> int:
    """Show RUN live in the terminal: state, progress, attempts, curve, ranks and log.

    It ends when the run has ended, with the run's outcome as exit code. q or Ctrl-C quits earlier;
    the run continues. Without a terminal it prints one picture.
    """
    from hpcddp.cli.terminal.screen import size
    from hpcddp.cli.terminal.shown import only_ascii
    from hpcddp.submit import submission

    folder = submission.find(runs_root(runs), run)
    if sys.stdout.isatty() and not once and not _dumb():
        return live(folder, every, plain=only_ascii())
    columns, lines = size(PAGE)
    return still(folder, columns, lines - int(sys.stdout.isatty()), plain=only_ascii())


def _dumb() -> bool:
    """Whether the terminal cannot move its cursor."""
    return os.environ.get("TERM", "") in ("", "dumb", "unknown")


def viewer(folder: RunDir) -> Viewer:
    """A viewer that reads only the parts of a run that a picture shows."""
    from hpcddp.cli.terminal.picture import SKIP
    from hpcddp.observe.viewer import Viewer

    return Viewer(folder, POINTS, SKIP)


def still(folder: RunDir, columns: int, lines: int, *, plain: bool) -> int:
    """Print one picture; the exit code of `status`."""
    from hpcddp.cli.runs import warn_stale
    from hpcddp.submit import status

    view = viewer(folder).look(status.status(folder))
    _put(view, columns, lines, plain)
    return warn_stale([view.status])


def live(folder: RunDir, every: float, *, plain: bool) -> int:
    """Show a run until it has ended or a person quits; its outcome as exit code."""
    from hpcddp.cli.terminal.follow import outcome
    from hpcddp.cli.terminal.screen import Screen, size
    from hpcddp.observe.poll import StatusPoll

    reader, poll = viewer(folder), StatusPoll(folder, aside=True)
    view = reader.look(poll.look(), READ)  # its errors appear on the usual screen
    try:
        with Screen().taken() as screen:
            while view.behind or not view.status.final:
                if _left(screen, view, every, plain):
                    return 0
                view = reader.look(poll.look(), READ)
    except KeyboardInterrupt:
        return 130
    columns, lines = size()
    _put(view, columns, lines - 1, plain)
    return outcome(view.status)


def _left(screen: Screen, view: View, every: float, plain: bool) -> bool:
    """Show a view until the next look is due; whether a person quit meanwhile."""
    from hpcddp.cli.terminal.screen import size

    until = time.monotonic() + every
    while (rest := until - time.monotonic()) > 0:
        screen.show(_lines(view, *size(), plain))  # again after each change of the size
        if b"q" in screen.key(0 if view.behind else rest).lower():
            return True
        if view.behind:
            break
    return False


def _lines(view: View, columns: int, lines: int, plain: bool) -> list[str]:
    """A picture as lines with colours."""
    from hpcddp.cli.terminal.picture import picture

    console = _console(columns, lines)
    with console.capture() as capture:
        hint = f"reading old metrics, {HINT}" if view.behind else HINT
        console.print(picture(view, columns, lines, plain=plain, hint=hint), end="")
    return capture.get().removesuffix("\n").split("\n")


def _put(view: View, columns: int, lines: int, plain: bool) -> None:
    """Print a picture at the cursor."""
    from hpcddp.cli.terminal.picture import picture

    _console(columns, lines).print(picture(view, columns, lines, plain=plain), end="")


def _console(columns: int, lines: int) -> Console:
    from rich.console import Console

    return Console(width=columns, height=lines, highlight=False, markup=False, emoji=False)
