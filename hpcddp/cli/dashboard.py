"""`hpcddp dashboard`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hpcddp.cli.options import runs_option, runs_root
from hpcddp.errors import UserError


@click.command()
@runs_option
@click.option("--socket", "path", metavar="PATH", help="A Unix socket that only you can open.")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", help="A port with a token; 0 picks one."
)
def dashboard(runs: str | None, path: str | None, port: int | None) -> int:
    """Show all runs in a browser, live and read only, until Ctrl-C.

    It listens on a Unix socket of your own, for `ssh -L`, which it prints.
    """
    root = runs_root(runs)
    if path is not None and port is not None:
        raise click.UsageError("--socket and --port: which of the two?")
    if not root.is_dir():
        hint = "name the folder of the runs with --runs or HPCDDP_RUNS"
        raise UserError("there is no such folder", where=str(root), hint=hint)
    try:
        from hpcddp.dashboard import app
    except ModuleNotFoundError as error:
        hint = "pip install 'hpcddp[dashboard]'"
        raise UserError(f"the dashboard needs {error.name}", hint=hint) from None
    from hpcddp.dashboard import listener
    from hpcddp.dashboard.all_runs import Folder

    if port is not None:
        opening = listener.on_port(port)
    else:
        opening = listener.on_socket(Path(path) if path else listener.own_path(root))
    with opening as door:
        click.echo(os.fsencode(f"dashboard of {root}"))  # a path may be no text
        for name, value in door.lines(os.uname().nodename):
            click.echo(os.fsencode(f"  {name + ':':21}{value}"))
        click.echo("Ctrl-C ends it", err=True)
        return app.serve(Folder(root), door)
