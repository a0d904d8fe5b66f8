"""`hpcddp ls` and `hpcddp status`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from hpcddp.cli.options import complete_runs, json_option, runs_option, runs_root

if TYPE_CHECKING:
    from hpcddp.submit.status import Status


@click.command()
@runs_option
@json_option
def ls(runs: str | None, as_json: bool) -> int:
    """List the runs, newest first."""
    from hpcddp.submit.status import status_all

    found = status_all(runs_root(runs))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "runs": [s.to_dict() for s in found]}))
    else:
        rows = [("RUN", "STATE", "JOB", "SIZE", "STEP", "SINCE")]
        rows += [(s.run, s.state, s.job_id or "-", size(s), step(s), s.since) for s in found]
        wide = [max(len(row[i]) for row in rows) for i in range(5)]
        for row in rows if found else []:
            click.echo("  ".join(f"{v:{w}}" for v, w in zip(row, [*wide, 0], strict=True)).rstrip())
        if not found:
            click.echo(f"no runs in {runs_root(runs)}", err=True)
    return warn_stale(found)


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@runs_option
@json_option
def status(run: str, runs: str | None, as_json: bool) -> int:
    """Tell how RUN is: its state, where it runs, how far it is, and why it waits."""
    from hpcddp.submit import status as status_
    from hpcddp.submit import submission

    found = status_.status(submission.find(runs_root(runs), run))
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        for name, value in lines(found):
            click.echo(f"{name:9} {value}")
    return warn_stale([found])


def size(found: Status) -> str:
    return f"{found.nodes}x{found.gpus_per_node}"


def step(found: Status) -> str:
    return f"{found.step}/{found.total_steps}" if found.total_steps else str(found.step or "-")


def lines(found: Status) -> list[tuple[str, str]]:
    """A status as rows for a person; what is unknown has no row."""
    rows = [
        ("run", found.run),
        ("state", found.state + (f" ({found.reason})" if found.reason else "")),
        ("since", found.since),
        ("job", f"{found.job_id} on {found.backend}" if found.job_id else ""),
        ("size", f"{found.nodes} nodes x {found.gpus_per_node} GPUs"),
        ("hosts", found.hosts),
        ("attempt", str(found.attempt or "")),
        ("step", step(found) if found.step else ""),
        ("loss", f"{found.loss:.4g}" if found.loss is not None else ""),
        ("metrics", ", ".join(f"{n} {v:.4f}" for n, v in (found.metrics or {}).items())),
        ("policy", "" if found.final else found.policy),
        ("folder", found.path),
    ]
    return [(name, value) for name, value in rows if value]


def warn_stale(found: list[Status]) -> int:
    """Exit code 3, and a line, if Slurm did not answer for some of them."""
    stale = [s for s in found if s.stale]
    if stale:
        click.echo(f"warning: {stale[0].reason}: this is the last known state", err=True)
    return 3 if stale else 0
