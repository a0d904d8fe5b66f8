"""`hpcddp why`: each attempt of a run, why it ended, and what it cost."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import complete_runs, json_option, runs_option, runs_root
from hpcddp.cli.runs import warn_stale

if TYPE_CHECKING:
    from hpcddp.observe.history import AttemptSummary


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@runs_option
@json_option
def why(run: str, runs: str | None, as_json: bool) -> int:
    """Tell why each attempt of RUN ended, what it did and lost, and what came next."""
    from hpcddp.observe import history
    from hpcddp.submit import submission
    from hpcddp.submit.status import status

    folder = submission.find(runs_root(runs), run)
    found = status(folder)
    rows = history.rows(folder, over=found.final)
    lost = sum(row.lost for row in rows)
    if as_json:
        facts: dict[str, Any] = {"schema_version": 1, "run": folder.name, "state": found.state}
        facts |= {"reason": found.reason, "steps_lost": lost}
        click.echo(json.dumps(facts | {"attempts": [row.to_dict() for row in rows]}))
        return warn_stale([found])
    reason = f": {found.reason}" if found.reason else ""
    click.echo(f"{found.run} is {found.state}{reason}")
    if rows:
        click.echo(table(rows))
        click.echo(f"steps lost: {lost}")
    if failed := next((row for row in reversed(rows) if row.error), None):
        click.echo(words(failed))
    return warn_stale([found])


COLUMNS = ("attempt", "began", "ran", "hosts", "cause", "signal", "steps", "lost", "safe", "next")


def table(rows: list[AttemptSummary]) -> str:
    """The attempts as a table."""
    cells = [COLUMNS, *(tuple(_cells(row)) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


def _cells(row: AttemptSummary) -> list[str]:
    steps = f"{row.first + 1}-{row.last}" if row.last > row.first else "-"
    return [
        str(row.attempt),
        time.strftime("%m-%d %H:%M:%S", time.localtime(row.began)),
        f"{row.ended - row.began:.0f} s" if row.ended else _since(row),
        row.hosts or "here",
        row.cause or "works",
        row.by or "-",
        steps,
        str(row.lost),
        f"{row.safe_s:.1f} s" if row.safe_s is not None else "-",
        (row.action or "-") + (f" ({row.reason})" if row.reason else ""),
    ]


def _since(row: AttemptSummary) -> str:
    return "?" if row.cause else f"{time.time() - row.began:.0f} s"


def words(row: AttemptSummary) -> str:
    """What the first failing rank of an attempt wrote down, or would have."""
    error = row.error or {}
    who = f"rank {error['rank']}" if error.get("rank") is not None else "a rank"
    who += f" on {error['host']}" if who != "a rank" and error.get("host") else ""
    text = error.get("traceback") or f"{error.get('type')}: {error.get('message')}"
    return f"attempt {row.attempt}, {who}:\n{text.rstrip()}"
