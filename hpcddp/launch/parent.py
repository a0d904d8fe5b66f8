"""The parent of a node's ranks, which outlives their attempts.

    python -P -m hpcddp.launch.parent RANKS_PER_NODE COMMAND...

The supervisor (attempt/link/supervisor.py) starts it once per node with srun, and it lives as long
as the batch script works in the allocation. It imports torch, and forks the ranks of each attempt
that the supervisor orders: the next attempt after a failure needs no import. What it does with one
attempt is that of fork.py. If the supervisor is gone, so is the batch script: the ranks get TERM,
and the parent leaves.

HPCDDP_SUPERVISOR has the address, HPCDDP_SECRET the secret of the supervisor's socket.
"""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import sys
import time
from contextlib import suppress

from hpcddp.attempt.error_record import host
from hpcddp.attempt.link import channel, progress
from hpcddp.attempt.link.channel import Channel, Message
from hpcddp.attempt.link.parents import ADDRESS, SECRET
from hpcddp.attempt.link.progress import Progress
from hpcddp.attempt.link.supervisor import end_of_lines
from hpcddp.launch import fork
from hpcddp.launch.children import KILL_WAIT, Group, patience
from hpcddp.launch.script import Script
from hpcddp.preempt import stop_signals
from hpcddp.processes import adopt_orphans, with_room
from hpcddp.topology import Rank, Topology

BEAT = 0.5  # seconds between two signs of life


class Parent:
    """The parent of the ranks of one node.

    Args:
        supervisor: the connection to it.
        node: its number in the allocation.
        ranks: of this node.
    """

    def __init__(self, supervisor: Channel, node: int, ranks: int) -> None:
        self.supervisor, self.node, self.ranks = supervisor, node, ranks
        self.group: Group | None = None
        self.leaving, self.attempt = False, 0
        self.progress = Progress(ranks)
        os.environ[progress.NAME] = str(self.progress.descriptor)
        self._next_beat = 0.0
        self.stops = {*stop_signals(), signal.SIGINT}
        for number in self.stops:
            signal.signal(number, self._signalled)

    def serve(self) -> None:
        """Obey until there is nothing more to do.

        Raises:
            fork.Born: in a forked process, which is a rank.
        """
        while self.group or not (self.leaving or self.supervisor.closed):
            if self.group is None:
                select.select([self.supervisor], [], [], BEAT)
            elif not self.group.turn():
                self._ended(self.group.finish())
            for order in self.supervisor.receive():
                self._obey(order)
            if self.supervisor.closed and self.group:
                self.group.end()
            self._beat()

    def _obey(self, order: Message) -> None:
        if "start" in order:
            self._start(**order)
        elif "signal" in order and self.group:
            self.group.signal(order["signal"])
        elif "end" in order and self.group:
            self.group.end()
        self.leaving = self.leaving or "leave" in order

    def _start(self, start: int, node: int, nodes: int, environ: dict[str, str]) -> None:
        """Fork the ranks of an attempt."""
        self.attempt = start
        os.environ.update(environ)
        topology = Topology(nodes, self.ranks)
        ranks = [topology.rank_of(topology.rank(node, local)) for local in range(self.ranks)]
        gc.collect()
        gc.freeze()  # the ranks share this memory until one writes to it
        wait = fork.SLURM_KILL_WAIT if "SLURM_JOB_ID" in os.environ else KILL_WAIT
        out = io.FileIO(1, "w", closefd=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, self.stops)
        self.group = Group(ranks, fork.start, out, kill_wait=wait, wait=patience(os.environ))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.stops)
        self.supervisor.send(started=start)

    def _ended(self, code: int) -> None:
        """Tell that the ranks have ended, also behind their lines, which take another way."""
        self.group = None
        self.supervisor.send(ended=self.attempt, code=code)
        with suppress(OSError):
            os.write(1, end_of_lines(self.attempt, self.node) + b"\n")

    def _beat(self) -> None:
        if (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + BEAT
            self.supervisor.send(steps=self.progress.total)

    def _signalled(self, number: int, frame: object) -> None:
        """Slurm signals the ranks too; without ranks, a stop signal ends this process."""
        if self.group:
            self.group.signal(number)
        elif number == signal.SIGTERM:
            self.leaving = True


def main(args: list[str]) -> int:
    """Import torch, and serve; in a forked process: be a rank."""
    here, *command = args
    script, node = Script(command), Rank.from_env(os.environ).world_rank
    address, _, port = os.environ.pop(ADDRESS).rpartition(":")
    secret = os.environ.pop(SECRET)
    os.environ.pop("RANK", None)  # this process is no rank, and answers for none
    fork.preload(os.environ)
    device = fork.open_gpu()
    adopt_orphans()
    supervisor = channel.connect(address, int(port), secret)
    supervisor.send(hello=node, host=host(), pid=os.getpid())
    parent = Parent(supervisor, node, int(here))
    try:
        parent.serve()
    except fork.Born as born:
        supervisor.close()
        for number in parent.stops:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        fork.be(born.rank)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, parent.stops)
        return fork.run(script, command, device)
    os._exit(0)  # at once: the end of the job waits for this process


if __name__ == "__main__":
    sys.exit(with_room(lambda: main(sys.argv[1:])))
