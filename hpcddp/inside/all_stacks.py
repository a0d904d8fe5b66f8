"""The stacks of all ranks of a running job, ranks with the same stack together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hpcddp import record
from hpcddp.errors import SlurmUnreachable
from hpcddp.inside.running import Running, running
from hpcddp.rundir import RunDir
from hpcddp.slurm import other_clusters, steps
from hpcddp.slurm.commands import first_line
from hpcddp.slurm.hostlist_writer import compress_hosts
from hpcddp.stacks import stack_reader
from hpcddp.stacks.stack_reader import Frame, RankStack

PATIENCE = 60.0  # seconds for all nodes
NO_PROCESS = "no process of it runs here: it is starting, or has ended"
NO_ANSWER = "its node does not answer"


class StackGroup(NamedTuple):
    """Ranks whose main threads have the same stack."""

    ranks: list[int]
    hosts: list[str]
    frames: tuple[Frame, ...]  # the innermost first


@dataclass
class AllStacks:
    """The stacks of all ranks of an attempt."""

    run: str
    attempt: int
    size: int  # ranks
    groups: list[StackGroup]  # the largest first
    away: list[RankStack]  # ranks that are stopped or whose stack cannot be read
    message: str = ""  # of srun, if nodes did not answer

    @property
    def unread(self) -> list[RankStack]:
        return [stack for stack in self.away if not stack.frames]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with its schema version."""
        groups = [
            {**group._asdict(),
             "frames": [dict(zip(("file", "line", "function"), f, strict=True))
                        for f in group.frames]}
            for group in self.groups
        ]  # fmt: skip
        away = [{"rank": s.rank, "host": s.host, "pid": s.pid, "state": s.state,
                 "reason": s.reason} for s in self.away]  # fmt: skip
        return {"schema_version": 1, **asdict(self), "groups": groups, "away": away}


def gather(run: RunDir) -> AllStacks:
    """The stacks of all ranks of a run, now.

    Raises:
        RunError: the run does not run.
        SlurmUnreachable: srun reaches none of its nodes.
    """
    now = running(run)
    message = ""
    if now.slurm:
        stacks, message = _from_nodes(now)
    else:
        stacks = stack_reader.here(str(run.path), now.attempt.number)
    stacks += _missing(now, stacks)
    away = [stack for stack in stacks if stack.state or not stack.frames]
    number = now.attempt.number
    return AllStacks(run.name, number, now.size, grouped(stacks), away, message)


def _from_nodes(now: Running) -> tuple[list[RankStack], str]:
    """The stacks that the nodes of a job tell, and srun's message about those that do not."""
    words = steps.on_node(
        str(now.run.host), "stacks", str(now.run.path), str(now.attempt.number)
    )  # fmt: skip
    hosts = compress_hosts(now.hosts)
    with other_clusters.asked(record.read(now.run).clusters):
        argv = steps.step(now.job_id, hosts, len(now.hosts), words, now.attempt.release)
        out, err = steps.output(argv, PATIENCE)
    stacks = stack_reader.from_lines(out)
    message = first_line(err) if err.strip() else ""
    if not stacks and message:
        hint = "try again; `hpcddp shell` reaches the node of one rank"
        raise SlurmUnreachable(f"no node answers: {message}", where=now.run.name, hint=hint)
    return stacks, message


def _missing(now: Running, stacks: Iterable[RankStack]) -> list[RankStack]:
    """The ranks of which nothing was read."""
    known = {stack.rank for stack in stacks}
    answering = {now.host_of(rank) for rank in known if rank < now.size}
    return [
        RankStack(rank, host, 0, (), reason=NO_PROCESS if host in answering else NO_ANSWER)
        for rank in range(now.size)
        if rank not in known
        for host in [now.host_of(rank)]
    ]


def grouped(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Ranks with the same stack together, the largest group first."""
    same: dict[tuple[Frame, ...], list[RankStack]] = {}
    for stack in sorted(stacks):
        if stack.frames:
            same.setdefault(stack.frames, []).append(stack)
    groups = [
        StackGroup([s.rank for s in of], list(dict.fromkeys(s.host for s in of)), frames)
        for frames, of in same.items()
    ]
    return sorted(groups, key=lambda group: (-len(group.ranks), group.ranks))
