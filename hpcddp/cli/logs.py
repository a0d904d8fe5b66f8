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


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option("--rank", type=click.IntRange(min=0), help="Lines of this rank only.")
@click.option("--attempt", type=click.IntRange(min=1), help="This attempt only.")
@runs_option
def logs(run: str, runs: str | None, follow: bool, rank: int | None, attempt: int | None) -> int:
    """Print what the ranks of RUN wrote, each line with its rank; all attempts, oldest first."""
    from hpcddp.submit import submission

    folder = submission.find(runs_root(runs), run)
    check_rank(folder, rank)
    if follow:
        from hpcddp.cli.follow import follow_log

        return follow_log(folder, keep(rank), attempt)
    for path in paths(folder, attempt):
        write(path, keep(rank))
    return 0


def check_rank(run: RunDir, rank: int | None) -> None:
    """Refuse a rank that the run cannot have."""
    world = record.read(run).world_size
    if rank is not None and rank >= world:
        raise RunError(f"rank {rank} is not in 0..{world - 1}", where=run.name)


def keep(rank: int | None) -> Callable[[bytes], bool]:
    """Whether a line is wanted."""
    if rank is None:
        return lambda line: True
    label = joblog.label(rank)
    return lambda line: label.match(line) is not None


def write(path: Path, wanted: Callable[[bytes], bool]) -> None:
    """Print the wanted lines, safe for a terminal."""
    if not path.exists():
        return
    with path.open("rb") as f:
        for line in f:
            if wanted(line):
                put(line)
