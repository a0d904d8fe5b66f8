"""`hpcddp stacks`: the stacks of all ranks, now."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from hpcddp.cli.options import complete_runs, json_option, runs_option, runs_root
from hpcddp.sizes import counted

if TYPE_CHECKING:
    from hpcddp.inside.all_stacks import AllStacks
    from hpcddp.stacks.stack_reader import RankStack

PARTLY = 4  # exit code


@click.command()
@click.argument("run", default="last", shell_complete=complete_runs)
@runs_option
@json_option
def stacks(run: str, runs: str | None, as_json: bool) -> int:
    """Show where each rank of RUN (the last one by default) is in its code, now.

    Ranks with the same stack are together, the largest group first. It works while the ranks hang,
    and disturbs nothing. If a rank does not answer, py-spy reads its
    stack, where its node has py-spy.

    The exit code is 4 if the stack of a rank cannot be read.
    """
    from hpcddp.inside import all_stacks
    from hpcddp.submit import submission

    answer = all_stacks.gather(submission.find(runs_root(runs), run))
    if as_json:
        click.echo(json.dumps(answer.to_dict()))
    else:
        for line in text(answer):
            click.echo(line)
    return PARTLY if answer.unread else 0


def text(answer: AllStacks) -> Iterator[str]:
    """The stacks for people."""
    from hpcddp.slurm.hostlist_writer import compress_hosts, number_ranges

    several = counted(len(answer.groups), "stack")
    yield f"{answer.run}: attempt {answer.attempt}, {counted(answer.size, 'rank')}, {several}"
    for group in answer.groups:
        ranks = number_ranges([str(rank) for rank in group.ranks])
        many = "ranks" if len(group.ranks) > 1 else "rank"
        yield f"\n{many} {ranks} on {compress_hosts(group.hosts)}:"
        yield from (f"  {file}:{line} in {name}" for file, line, name in group.frames)
    if answer.away:
        yield ""
    yield from map(_away, answer.away)
    if answer.message:
        yield f"srun: {answer.message}"


def _away(stack: RankStack) -> str:
    process = f", process {stack.pid}" if stack.pid else ""
    words = "; ".join(filter(None, (stack.state, stack.reason)))
    return f"rank {stack.rank} on {stack.host}{process}: {words}"
