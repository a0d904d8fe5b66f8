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

    states = status_all(runs_root(runs))
    if as_json:
        click.echo(json.dumps({"schema_version": 1, "runs": [s.to_dict() for s in states]}))
    else:
        rows = [("RUN", "STATE", "JOB", "SIZE", "STEP", "SINCE")]
        rows += [(s.run, s.state, s.job_id or "-", size(s), step(s), s.since) for s in states]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        for row in rows if states else []:
            click.echo(
                "  ".join(f"{v:{w}}" for v, w in zip(row, [*widths, 0], strict=True)).rstrip()
            )
        if not states:
            click.echo(f"no runs in {runs_root(runs)}", err=True)
    return warn_stale(states)


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@runs_option
@json_option
def status(run: str, runs: str | None, as_json: bool) -> int:
    """Tell how RUN is: its state, where it runs, how far it is, and why it waits."""
    from hpcddp.submit import status as status_
    from hpcddp.submit import submission

    state = status_.status(submission.find(runs_root(runs), run))
    if as_json:
        click.echo(json.dumps(state.to_dict()))
    else:
        for name, value in lines(state):
            click.echo(f"{name:9} {value}")
    return warn_stale([state])


def size(state: Status) -> str:
    return f"{state.nodes}x{state.gpus_per_node}"


def step(state: Status) -> str:
    return f"{state.step}/{state.total_steps}" if state.total_steps else str(state.step or "-")


def lines(state: Status) -> list[tuple[str, str]]:
    """A status as rows for a person, without the unknown values."""
    rows = [
        ("run", state.run),
        ("state", state.state + (f" ({state.reason})" if state.reason else "")),
        ("since", state.since),
        ("job", f"{state.job_id} on {state.backend}" if state.job_id else ""),
        ("size", f"{state.nodes} nodes x {state.gpus_per_node} GPUs"),
        ("hosts", state.hosts),
        ("attempt", str(state.attempt or "")),
        ("step", step(state) if state.step else ""),
        ("loss", f"{state.loss:.4g}" if state.loss is not None else ""),
        ("metrics", ", ".join(f"{n} {v:.4f}" for n, v in (state.metrics or {}).items())),
        ("policy", "" if state.final else state.policy),
        ("folder", state.path),
    ]
    return [(name, value) for name, value in rows if value]


def warn_stale(states: list[Status]) -> int:
    """Exit code 3, and a line, if Slurm did not answer for some of them."""
    stale = [state for state in states if state.stale]
    if stale:
        click.echo(f"warning: {stale[0].reason}: this is the last known state", err=True)
    return 3 if stale else 0
