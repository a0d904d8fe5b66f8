"""`hpcddp logs`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hpcddp import record
from hpcddp.attempt import joblog
from hpcddp.cli.options import complete_runs, runs_option, runs_root
from hpcddp.cli.terminal.log_lines import paths, put
from hpcddp.errors import RunError
from hpcddp.rundir import RunDir
from hpcddp.sizes import counted


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the run ends.")
@click.option("--rank", metavar="N", type=click.IntRange(min=0), help="Only lines of this rank.")
@click.option("--attempt", metavar="N", type=click.IntRange(min=1), help="Only this attempt.")
@runs_option
def logs(run: str, runs: str | None, follow: bool, rank: int | None, attempt: int | None) -> int:
    """Print the log of RUN (the last one by default): the output of all ranks.

    Each line begins with its rank. The attempts follow one another, the oldest first.
    """
    from hpcddp.submit import submission

    folder = submission.find(runs_root(runs), run)
    check_rank(folder, rank)
    if follow:
        from hpcddp.cli.terminal.follow import follow_log

        return follow_log(folder, keep(rank), attempt)
    for path in paths(folder, attempt):
        write(path, keep(rank))
    return 0


def check_rank(run: RunDir, rank: int | None) -> None:
    """Refuse a rank that the run does not have."""
    world = record.read(run).world_size
    if rank is not None and rank >= world:
        hint = f"the run has {counted(world, 'rank')}, the first is 0"
        raise RunError(f"no rank {rank}", where=run.name, hint=hint)


def keep(rank: int | None) -> Callable[[bytes], bool]:
    """A function that says whether a line is of a rank."""
    if rank is None:
        return lambda line: True
    label = joblog.label(rank)
    return lambda line: label.match(line) is not None


def write(path: Path, wanted: Callable[[bytes], bool]) -> None:
    """Print the wanted lines of a log."""
    if not path.exists():
        return
    with path.open("rb") as f:
        for line in f:
            if wanted(line):
                put(line)
