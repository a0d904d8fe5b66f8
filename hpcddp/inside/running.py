"""The attempt of a run that runs now: its job, its nodes and its ranks."""

from __future__ import annotations

import os
from typing import NamedTuple

from hpcddp import record
from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import HpcddpError, RunError, SlurmUnreachable
from hpcddp.rundir import RunDir
from hpcddp.sizes import counted
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.submit.status import Status, status


class Running(NamedTuple):
    """A running attempt."""

    run: RunDir
    attempt: Attempt
    hosts: list[str]  # its nodes in the order of ranks; of a local run this machine alone
    ranks_here: int  # on each of them

    @property
    def slurm(self) -> bool:
        return self.attempt.slurm

    @property
    def job_id(self) -> str:
        """The number of its job; that of an array's element has no `_`."""
        return self.attempt.said_id or self.attempt.job_id

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.hosts) * self.ranks_here

    def host_of(self, rank: int) -> str:
        """The node of a rank.

        Raises:
            RunError: the attempt does not have this rank.
        """
        if rank >= self.size:
            hint = f"the attempt has {counted(self.size, 'rank')}, the first is 0"
            raise RunError(f"no rank {rank}", where=self.run.name, hint=hint)
        return self.hosts[rank // self.ranks_here]


def running(run: RunDir) -> Running:
    """The running attempt of a run.

    Raises:
        RunError: none runs now.
        SlurmUnreachable: Slurm does not answer.
    """
    now, last = status(run), ledger.last(run)
    if last and last.live and not last.slurm and last.host != os.uname().nodename:
        what = f"the run is on {last.host}, and this is {os.uname().nodename}"
        raise RunError(what, where=run.name, hint=f"run the command there: ssh {last.host}")
    if now.stale:
        raise SlurmUnreachable(now.reason, where=run.name, hint="try again")
    if now.state != "RUNNING" or not (last and last.live):
        raise _not_running(run, now)
    job = record.read(run)
    if last.slurm:
        return Running(run, last, expand_hosts(last.nodes), job.ranks_per_node)
    return Running(run, last, [last.host], job.nodes[1] * job.ranks_per_node)


def _not_running(run: RunDir, now: Status) -> HpcddpError:
    """The error of a run that does not run: its state, and what to do."""
    if now.state == "RUNNING":
        hint = "try again when its attempt has started"
        return RunError("the run is still starting", where=run.name, hint=hint)
    hint = "try again"
    if now.state == "PENDING":
        hint = f"`hpcddp status {run.name}` says why it waits"
    elif now.state == "RENDERED":
        hint = f"submit it: sbatch {run.script}"
    elif now.final:
        hint = (
            f"`hpcddp why {run.name}` says how it ended, `hpcddp logs {run.name}` what it printed"
        )
    return RunError(f"no rank runs: the run is {now.state}", where=run.name, hint=hint)
