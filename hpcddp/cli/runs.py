"""`hpcddp ls` and `hpcddp status`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from hpcddp.cli.options import complete_runs, json_option, runs_option, runs_root
from hpcddp.cli.terminal import say, tables
from hpcddp.sizes import counted

if TYPE_CHECKING:
    from hpcddp.submit.status import Status

COLUMNS = ("RUN", "STATE", "JOB", "SIZE", "STEP", "SINCE")


@click.command()
@runs_option
@json_option
def ls(runs: str | None, as_json: bool) -> int:
    """List runs, newest first."""
    from hpcddp.submit import run_list, times
    from hpcddp.submit.status import status_all

    root = runs_root(runs)
    states = status_all(root)
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "runs": [s.to_dict() for s in states]}))
        return warn_stale(states)
    rows = [(s.run, s.state, s.job_id or "-", size(s), step(s), times.shown(s.since) or "-")
            for s in states]  # fmt: skip
    for line in tables.table([COLUMNS, *rows], styles={1: say.paint_state}) if rows else ():
        click.echo(line)
    if not rows:
        click.echo(f"no runs in {root}\n  {run_list.START}", err=True)
    return warn_stale(states)


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@runs_option
@json_option
def status(run: str, runs: str | None, as_json: bool) -> int:
    """Show state, progress and pending reason of RUN (the last one by default)."""
    from hpcddp.observe import recovery
    from hpcddp.submit import status as status_
    from hpcddp.submit import submission

    folder = submission.find(runs_root(runs), run)
    state = status_.status(folder)
    recovered = recovery.newest(folder)
    if as_json:
        click.echo(json.dumps({**state.to_dict(), "recovered": str(recovered or "")}))
    else:
        for line in tables.fields(lines(state, recovered), whole=("run", "folder")):
            click.echo(line)
    return warn_stale([state])


def size(state: Status) -> str:
    return f"{state.nodes}x{state.gpus_per_node}"


def step(state: Status) -> str:
    return f"{state.step}/{state.total_steps}" if state.total_steps else str(state.step or "-")


def lines(state: Status, recovery: object = None) -> list[tuple[str, str]]:
    """The known values of a status, with their names.

    Args:
        recovery: how its attempt continued in place.
    """
    from hpcddp.submit import times

    nodes = counted(int(state.nodes), "node") if state.nodes.isdigit() else f"{state.nodes} nodes"
    reason = "last known" if state.stale else state.reason
    waits = state.state == "PENDING" and not state.stale
    rows = [
        ("run", state.run),
        ("state", say.paint_state(state.state) + (f" ({reason})" if reason and not waits else "")),
        ("waits", reason if waits else ""),
        ("starts", f"{times.shown(state.expected)}, as Slurm expects" if state.expected else ""),
        ("since", times.shown(state.since)),
        ("job", f"{state.job_id} on {state.backend}" if state.job_id else ""),
        ("size", f"{nodes} x {counted(state.gpus_per_node, 'GPU')}"),
        ("hosts", state.hosts),
        ("attempt", f"{state.attempt or ''}{f', in place {recovery}' if recovery else ''}"),
        ("step", step(state) if state.step else ""),
        ("loss", f"{state.loss:.4g}" if state.loss is not None else ""),
        ("metrics", ", ".join(f"{n} {v:.4f}" for n, v in (state.metrics or {}).items())),
        ("policy", "" if state.final else state.policy),
        ("folder", state.path),
    ]
    return [(name, value) for name, value in rows if value]


def warn_stale(states: list[Status]) -> int:
    """Exit code 3, and a warning, if Slurm did not answer for some of them. JSON has it as `stale`
    and `reason`."""
    stale = [state for state in states if state.stale]
    if stale and not say.json_asked():
        say.warning(f"{stale[0].reason}: this is the last known state")
        from hpcddp.sandbox import shell

        if text := shell.reminder(os.environ):
            say.note(text)
    return 3 if stale else 0
