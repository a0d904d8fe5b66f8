"""`hpcddp why`: the attempts of a run, why each ended, and its cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from hpcddp import record
from hpcddp.cli.options import complete_runs, json_option, runs_option, runs_root
from hpcddp.cli.runs import warn_stale
from hpcddp.cli.terminal import say, tables

if TYPE_CHECKING:
    from hpcddp.observe.history import AttemptSummary


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@runs_option
@json_option
def why(run: str, runs: str | None, as_json: bool) -> int:
    """Show why each attempt of RUN (the last one by default) ended, its steps, and what followed.

    "lost" counts the steps since the last checkpoint, which the next attempt took again.
    "safe" is the time from the first stop signal to a complete checkpoint.
    """
    from hpcddp.observe import history
    from hpcddp.submit import submission
    from hpcddp.submit.status import status

    folder = submission.find(runs_root(runs), run)
    state = status(folder)
    attempts = history.summaries(folder, over=state.final)
    lost: int | None = sum(attempt.lost for attempt in attempts)
    if record.read(folder).spec.get("command") and not any(attempt.last for attempt in attempts):
        lost = None  # the program records no steps
    if as_json:
        facts: dict[str, Any] = {"schema_version": 1, "run": folder.name, "state": state.state}
        facts |= {"reason": state.reason, "steps_lost": lost}
        click.echo(json.dumps(facts | {"attempts": [attempt.to_dict() for attempt in attempts]}))
        return warn_stale([state])
    reason = f": {state.reason}" if state.reason else ""
    click.echo(f"{state.run} is {say.paint_state(state.state)}{reason}")
    if attempts:
        click.echo("\n".join(table(attempts, steps=lost is not None)))
        click.echo(f"steps lost: {'unknown' if lost is None else lost}")
    for attempt in attempts:
        if attempt.recovery:
            click.echo(f"after attempt {attempt.attempt}: in place {attempt.recovery}")
        if attempt.lost_why:
            click.echo(f"attempt {attempt.attempt}: steps lost: {attempt.lost_why}")
    if failed := next((attempt for attempt in reversed(attempts) if attempt.error), None):
        click.echo(words(failed))
    return warn_stale([state])


COLUMNS = ("attempt", "began", "ran", "hosts", "cause", "signal", "steps", "lost", "safe", "next")


def table(attempts: list[AttemptSummary], *, steps: bool = True) -> Iterator[str]:
    """The attempts as a table.

    Args:
        steps: the steps of the run are known.
    """
    return tables.table([COLUMNS, *(tuple(_cells(attempt, steps)) for attempt in attempts)])


def _cells(attempt: AttemptSummary, known: bool) -> list[str]:
    from hpcddp.submit import times

    steps = f"{attempt.first + 1}-{attempt.last}" if attempt.last > attempt.first else "-"
    return [
        str(attempt.attempt),
        times.shown(attempt.began),
        f"{attempt.ended - attempt.began:.0f} s" if attempt.ended else _since(attempt),
        attempt.hosts or "this machine",
        attempt.cause or "running",
        attempt.by or "-",
        steps,
        str(attempt.lost) if known else "-",
        f"{attempt.safe_s:.1f} s" if attempt.safe_s is not None else "-",
        (attempt.action or "-") + (f" ({attempt.reason})" if attempt.reason else ""),
    ]


def _since(attempt: AttemptSummary) -> str:
    return "?" if attempt.cause else f"{time.time() - attempt.began:.0f} s"


def words(attempt: AttemptSummary) -> str:
    """The error of the rank that failed first in an attempt."""
    error = attempt.error or {}
    who = f"rank {error['rank']}" if error.get("rank") is not None else "a rank"
    if error.get("kind") == "environment":
        who = "before the ranks"
    who += f" on {error['host']}" if who != "a rank" and error.get("host") else ""
    text = error.get("traceback") or f"{error.get('type')}: {error.get('message')}"
    return f"attempt {attempt.attempt}, {who}:\n{text.rstrip()}"
