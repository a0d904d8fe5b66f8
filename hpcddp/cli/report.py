"""`hpcddp report`: one or several runs as one HTML file."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root
from hpcddp.cli.terminal import say
from hpcddp.errors import HpcddpError, RunError, UserError

if TYPE_CHECKING:
    from hpcddp.rundir import RunDir
    from hpcddp.submit.status import Status

MOST = 12  # runs side by side
HEAD = 10  # lines of a file that may hold the mark of a report


@click.command()
@click.argument("run", nargs=-1, required=True, shell_complete=complete_runs)
@click.option(
    "-o", "--output", metavar="FILE",
    help="Output file; - is stdout.  [default: RUN.html, report.html for several]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Overwrite FILE even if it is not a report.")
@runs_option
def report(run: tuple[str, ...], output: str | None, force: bool, runs: str | None) -> int:
    """Write a report of RUN, or of several runs side by side, to one HTML file.

    The file needs no network. A run that has not ended is shown in its present state. An older
    report in FILE is replaced.
    """
    from hpcddp.cli.runs import warn_stale
    from hpcddp.submit import submission

    folders = list({f.path: f for f in (submission.find(runs_root(runs), r) for r in run)}.values())
    if len(folders) > MOST:
        message = f"a report has at most {MOST} runs, not {len(folders)}"
        raise UserError(message, hint="name fewer runs")
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
    """The views of runs. A run that cannot be read is left out with a warning.

    Raises:
        HpcddpError: no run can be read.
    """
    from hpcddp.observe.run_facts import static
    from hpcddp.observe.viewer import FOREIGN, Viewer, unreadable
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
            failed.append(unreadable(folder, error))
        if len(folders) > 1:
            say.warning(f"the report leaves out {folder.name}: {failed[-1]}")
    if not views:
        raise failed[0]
    return views, states


def check(target: Path, force: bool) -> None:
    """Check that only a report is overwritten.

    Raises:
        UserError: the target is a folder, a device, or another file.
    """
    from hpcddp.report import MARK

    if target.exists() and not target.is_file():
        kind = "a folder" if target.is_dir() else "not a regular file"
        raise UserError(f"this is {kind}", where=str(target), hint="name a file with -o")
    if force or not target.exists():
        return
    with target.open("rb") as f:
        head = b"".join(itertools.islice(f, HEAD))
    if MARK.encode() not in head:
        raise UserError(
            "this file exists and is not a report",
            where=str(target),
            hint="name another file with -o, or overwrite it with --force",
        )


def write(target: Path, text: str) -> None:
    """Write the page whole or not at all.

    Raises:
        RunError: the folder cannot be written.
    """
    from hpcddp.rundir import write_text

    try:
        write_text(target, text, 0o600)  # as private as run folders
    except OSError as error:
        raise RunError(
            f"cannot write the report: {error.strerror}",
            where=str(target),
            hint="name a file in another folder with -o, or use -o - for stdout",
        ) from None
