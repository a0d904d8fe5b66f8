"""`hpcddp report`: some runs as one HTML file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root
from hpcddp.errors import HpcddpError, RunError, UserError

if TYPE_CHECKING:
    from hpcddp.rundir import RunDir
    from hpcddp.submit.status import Status

MOST = 12  # runs side by side
HEAD = 10  # lines of a file that may hold the mark of a report


@click.command()
@click.argument("run", nargs=-1, required=True, shell_complete=complete_runs)
@click.option(
    "-o", "--output", metavar="FILE", help="Write there; - is stdout.  [default: ./RUN.html]"
)
@click.option("--force", is_flag=True, help="Overwrite FILE even if it is no report.")
@runs_option
def report(run: tuple[str, ...], output: str | None, force: bool, runs: str | None) -> int:
    """Write what happened in RUN to one HTML file that needs no network; several side by side.

    The run may still work: the page shows it as it is now. An older report is replaced.
    """
    from hpcddp.cli.runs import warn_stale
    from hpcddp.submit import submission

    folders = list({f.path: f for f in (submission.find(runs_root(runs), r) for r in run)}.values())
    if len(folders) > MOST:
        raise UserError(f"{len(folders)} runs are too many for one page", hint=f"{MOST} at most")
    name = f"{folders[0].name}.html" if len(folders) == 1 else "report.html"
    target = None if output == "-" else Path(output or name)
    if target:
        check(target, force)
    views, states = looked(folders)
    from hpcddp import report as pages

    text = pages.page(views)
    if target is None:
        click.echo(text, nl=False)
    else:
        write(target, text)
        click.echo(click.format_filename(target))
    return 4 if len(views) < len(folders) else warn_stale(states)


def looked(folders: list[RunDir]) -> tuple[list[dict[str, Any]], list[Status]]:
    """The views of runs. One that cannot be shown is left out with a warning.

    Raises:
        HpcddpError: none can be shown.
    """
    from hpcddp.observe.run_facts import static
    from hpcddp.observe.viewer import FOREIGN, Viewer
    from hpcddp.submit.status import status

    views, states = [], []
    failed: list[HpcddpError] = []
    for folder in folders:
        try:
            state = status(folder)
            views.append(Viewer(folder).look(state).to_dict() | static(folder))
            states.append(state)
            continue
        except HpcddpError as error:
            failed.append(error)
        except FOREIGN as error:
            message = f"its records are not of hpcddp's form: {type(error).__name__} {error}"
            failed.append(RunError(message, where=str(folder.path)))
        if len(folders) > 1:
            click.echo(f"warning: {folder.name} is left out: {failed[-1]}", err=True)
    if not views:
        raise failed[0]
    return views, states


def check(target: Path, force: bool) -> None:
    """Refuse to overwrite anything but a report.

    Raises:
        UserError: a folder, a device, or a file that is no report has this name.
    """
    from hpcddp.report import MARK

    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "no plain file"
        raise UserError(f"this is {kind}", where=str(target), hint="name a file with -o")
    if force or not target.exists():
        return
    with target.open("rb") as f:
        head = b"".join(itertools.islice(f, HEAD))
    if MARK.encode() not in head:
        raise UserError(
            "this file is no report, it stays as it is",
            where=str(target),
            hint="name another one with -o, or say --force",
        )


def write(target: Path, text: str) -> None:
    """Write the page, wholly or not at all.

    Raises:
        RunError: the folder cannot be written.
    """
    from hpcddp.rundir import write_text

    try:
        write_text(target, text, 0o600)  # as private as run dirs are
    except OSError as error:
        raise RunError(
            f"the report cannot be written: {error.strerror}",
            where=str(target),
            hint="name a file in a folder of yours with -o, or -o - for stdout",
        ) from None
