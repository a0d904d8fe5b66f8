"""`hpcddp dashboard`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpcddp.cli.options import runs_option, runs_root
from hpcddp.errors import UserError, install_extra


@click.command()
@runs_option
@click.option(
    "--socket", "path", metavar="FILE",
    help="Unix socket, which only you can open.  [default: one in a private folder]",
)  # fmt: skip
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N",
    help="Port of this machine in place of a socket, protected by a token; 0 is any free port.",
)  # fmt: skip
def dashboard(runs: str | None, path: str | None, port: int | None) -> int:
    """Show all runs live in a browser, until Ctrl-C.

    The pages are read-only. The dashboard listens on a Unix socket and prints the ssh command that
    leads there from your own machine.
    """
    root = runs_root(runs)
    if path is not None and port is not None:
        raise click.UsageError("--socket and --port cannot be used together")
    if not root.is_dir():
        from hpcddp.submit import run_list

        raise UserError("no such folder", where=str(root), hint=run_list.START)
    try:
        from hpcddp.dashboard import app
    except ModuleNotFoundError as error:
        hint = install_extra("dashboard")
        raise UserError(f"the dashboard needs the package {error.name}", hint=hint) from None
    from hpcddp.dashboard import listener
    from hpcddp.dashboard.all_runs import Folder

    if port is not None:
        opening = listener.on_port(port)
    else:
        opening = listener.on_socket(Path(path) if path else listener.own_path(root))
    with opening as door:
        click.echo(os.fsencode(f"dashboard of {root}"))  # a path may have any bytes
        for name, value in door.lines(os.uname().nodename):
            click.echo(os.fsencode(f"  {name + ':':21}{value}"))
        click.echo("press Ctrl-C to stop", err=True)
        return app.serve(Folder(root), door)
