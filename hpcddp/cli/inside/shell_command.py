"""`hpcddp shell`: a shell beside a rank."""

from __future__ import annotations

import click

from hpcddp.cli.options import complete_runs, runs_option, runs_root


def complete_ranks(ctx: click.Context, parameter: click.Parameter, begun: str) -> list[str]:
    """The ranks of the run that the command names."""
    from hpcddp import record
    from hpcddp.errors import HpcddpError
    from hpcddp.submit import submission

    try:
        run = submission.find(runs_root(ctx.params.get("runs")), ctx.params.get("run") or "last")
        numbers = map(str, range(record.read(run).world_size))
    except HpcddpError:
        return []
    return [number for number in numbers if number.startswith(begun)]


@click.command()
@click.argument("run", shell_complete=complete_runs)
@click.option("--rank", metavar="N", type=click.IntRange(min=0), default=0, show_default=True,
              shell_complete=complete_ranks, help="The rank.")  # fmt: skip
@runs_option
def shell(run: str, rank: int, runs: str | None) -> None:
    """Start a shell on the node of a rank of RUN, with the rank's variables, in its folder and
    its container.

    It shares the job's CPUs and GPUs with the ranks, and ends with the job. Commands can come from
    standard input:

    \b
      echo nvidia-smi | hpcddp shell last --rank 3
    """
    from hpcddp.inside import job_shell
    from hpcddp.submit import submission

    job_shell.become(submission.find(runs_root(runs), run), rank)
