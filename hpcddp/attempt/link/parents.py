"""The parents of a job's ranks, one per node: their step, their connections, and who lives.

A parent that is killed closes its connection, at once. One that is silent, as its node has no power
or no network, sends no sign of life. Only time in which this process runs counts as silence: a
suspended job is not lost. Nor is a node whose parent alone gets no processor: as long as the ranks
make steps, those of this node make them too.

A node that is lost may come back, while Slurm has not noticed: a new parent on it makes it a spare.
"""

from __future__ import annotations

import contextlib
import resource
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcddp.attempt.link import parent_step, rank_lines
from hpcddp.attempt.link.channel import TIMEOUT, Channel, Message
from hpcddp.attempt.link.parent_step import ParentStep
from hpcddp.attempt.link.sockets import Sockets

# Variables of a parent: of its supervisor, and how many seconds that may be silent.
ADDRESS, SECRET, HEARTBEAT = "HPCDDP_SUPERVISOR", "HPCDDP_SECRET", "HPCDDP_HEARTBEAT"
NODE = "HPCDDP_NODE"  # variable of a parent on a node that was lost: the node's number
PARENT = "hpcddp-parent"  # the name of a parent's process, in ps
PROTOCOL = 1  # of the messages, in a parent's first one
STUCK = "its ranks do not end"  # why a node is lost that is not to be used again
STRANGERS = 64  # connections without a proof, besides those of the parents
LOOK = 0.5  # seconds between two looks
BEAT = 1.0  # seconds between two signs of life for the parents
SRUN = 1.0  # seconds for srun to end, after all parents
LEAVE = 5.0  # seconds for the parents to leave
RETURN = 10.0  # seconds for a lost node to start a parent; twice as long each time


@dataclass
class Parent:
    """A parent.

    Args:
        channel: the connection to it.
        host: the name of its node.
        ready: it has imported all that its ranks need, and sends signs of life.
        silent: seconds since its last sign of life, without those in which nobody looked.
        steps: of its ranks, as far as they say.
        lost: why it counts as lost; "" while it lives.
        losses: times that its node was lost before.
    """

    channel: Channel
    host: str
    ready: bool = False
    silent: float = 0.0
    steps: int = 0
    lost: str = ""
    losses: int = 0


class Parents:
    """The parents of one allocation.

    Args:
        srun: the command that starts one on each node.
        count: the nodes.
        address: of this host, for them.
        heard: called with the node and each of its messages.
        written: called with lines of the ranks, without their ends.
        heartbeat: seconds of silence after which a parent is lost; 0 for no limit.
    """

    def __init__(
        self,
        srun: Sequence[str],
        count: int,
        address: str,
        heard: Callable[[int, Message], None],
        written: Callable[[list[bytes]], None],
        heartbeat: float,
    ) -> None:
        self._srun, self.count, self._address = list(srun), count, address
        self._heard, self._written, self._heartbeat = heard, written, heartbeat
        self._secret = secrets.token_hex(32)
        self._environ: dict[str, str] = {}
        self._step: ParentStep | None = None
        self._returning: dict[int, ParentStep] = {}  # by node, the newest one
        self._ended: set[str] = set()  # the hosts of their step's tasks that have ended
        self._gone: list[str] | None = None  # the hosts that were lost before the step was ended
        self.sockets = Sockets()
        self._strangers: dict[Channel, float] = {}  # connections without a proof, and since when
        self._clock = time.monotonic()
        self._steps, self._still = -1, 0.0  # of all ranks, and seconds since they became more
        self._next_beat = 0.0
        self.attempt = 0  # the newest one, for the parents
        self.active: set[int] = set()  # nodes whose ranks run
        self.by_node: dict[int, Parent] = {}
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):  # each node needs a descriptor
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        both = socket.has_dualstack_ipv6()  # a cluster may have one of the two
        family = socket.AF_INET6 if both else socket.AF_INET
        self._port = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self._port.listen(socket.SOMAXCONN)
        self.sockets.listen(self._port, self._greet)

    @property
    def living(self) -> list[int]:
        """The nodes whose parent lives, in their order."""
        return sorted(node for node, parent in self.by_node.items() if not parent.lost)

    def able(self, without: Sequence[str]) -> list[int]:
        """The nodes that can fork ranks, but for some hosts; those that were lost come last."""
        here = self.by_node
        able = [n for n in self.living if here[n].ready and here[n].host not in without]
        return sorted(able, key=lambda node: here[node].losses)

    @property
    def ready(self) -> bool:
        """Whether all have come, and those that live can fork ranks."""
        here = self.by_node
        living = [here[node] for node in self.living]
        came = len(here) + len(self.missing) >= self.count
        return came and all(one.ready or one.losses for one in living)

    @property
    def lost(self) -> dict[str, str]:
        """Hosts that are lost -> why; once the step is ended, those that were lost before."""
        lost = {parent.host: parent.lost for parent in self.by_node.values() if parent.lost}
        return {host: why for host, why in lost.items() if self._gone is None or host in self._gone}

    @property
    def missing(self) -> dict[str, str]:
        """Hosts whose task has ended before it could connect -> why they count as lost."""
        hosts = self._ended - {parent.host for parent in self.by_node.values()}
        return dict.fromkeys(sorted(hosts), "no parent of ranks could start")

    @property
    def code(self) -> int | None:
        """The exit code of their step; None while it runs, or if there is none."""
        return self._step.code if self._step else None

    @property
    def running(self) -> bool:
        """Whether a step of theirs runs."""
        steps = [self._step, *self._returning.values()]
        return any(step and step.code is None for step in steps)

    def turn(self, seconds: float = LOOK) -> None:
        """Wait for what comes, and see who is lost."""
        self.sockets.wait(seconds)
        now = time.monotonic()
        passed, self._clock = min(now - self._clock, 2 * LOOK), now
        for end in [end for end, since in self._strangers.items() if now > since + TIMEOUT]:
            del self._strangers[end]
            if not end.proven:
                end.close()
        self._beat(now)
        self._look(passed)

    def _beat(self, now: float) -> None:
        """Show the parents that this process lives: its node may be the one that is lost."""
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            for node in self.living:
                self.by_node[node].channel.send(beat=self.attempt)

    def _look(self, passed: float) -> None:
        """See who is lost.

        Args:
            passed: seconds since the last look, in which this process ran.
        """
        steps = sum(parent.steps for parent in self.by_node.values())
        self._still = 0.0 if steps != self._steps else self._still + passed
        self._steps = steps
        for node, parent in self.by_node.items():
            parent.silent += passed
            silent = min(parent.silent, self._still) if node in self.active else parent.silent
            if parent.channel.closed:
                parent.lost = parent.lost or "its connection is closed"
            elif parent.ready and 0 < self._heartbeat < silent:
                parent.lost = f"no sign of life for {parent.silent:.0f} s"
                parent.channel.close()  # if it wakes up, it ends its ranks

    def start(self, environ: Mapping[str, str]) -> None:
        """Start a parent on each node, but those that are lost.

        Raises:
            OSError: srun cannot be started.
        """
        self._note_lost()
        self._leave_out()
        self.by_node, self._secret, self._returning = {}, secrets.token_hex(32), {}
        where = {ADDRESS: f"{self._address}:{self._port.getsockname()[1]}", SECRET: self._secret}
        where[HEARTBEAT] = str(self._heartbeat)
        self._environ = {**environ, **where}
        self._ended = set()
        self._step = self._run(self._srun, self._environ, quiet=False)

    def _run(self, words: Sequence[str], environ: Mapping[str, str], **how: Any) -> ParentStep:
        step = ParentStep(words, environ, **how)
        number = step.fileno()

        def copy() -> None:
            lines = step.lines()
            if step is self._step:
                self._ended |= rank_lines.hosts_of_ended_tasks(lines)
            if step.closed:
                self.sockets.unwatch(number, copy)
            self._written(lines)

        self.sockets.watch(number, copy)
        return step

    def _note_lost(self) -> None:
        """Note who is lost, before the others end as well."""
        if self._gone is None:
            self._gone = [*self.lost]

    def _leave_out(self) -> None:
        """Start no parent on hosts that are lost: srun would wait for them."""
        hosts, self._gone = self._gone or [], None
        left = [parent.host for parent in self.by_node.values() if parent.host not in hosts]
        if hosts and left and (words := parent_step.on_hosts(self._srun, left)):
            self._srun, self.count = words, len(left)

    def call_back(self, without: Sequence[str]) -> None:
        """Start a parent on each lost node, in case it has come back, but on some hosts."""
        for node, parent in self.by_node.items():
            if parent.lost and parent.lost != STUCK and parent.host not in without:
                self._call_back(node, parent.host)

    def _call_back(self, node: int, host: str) -> None:
        if old := self._returning.get(node):
            if old.age < RETURN * 2 ** min(old.tries, 5):
                return
            old.kill()
        tries = old.tries + 1 if old else 0
        if words := parent_step.on_hosts(self._srun, [host]):
            with contextlib.suppress(OSError):  # tried again
                environ = {**self._environ, NODE: str(node)}
                self._returning[node] = self._run(words, environ, quiet=True, tries=tries)

    def dismiss(self, seconds: float = LEAVE) -> None:
        """Let them leave, once their ranks have ended, and end what is left of their step."""
        self._note_lost()
        for parent in self.by_node.values():
            parent.channel.send(leave=True)
        for node, step in self._returning.items():
            if self.by_node[node].lost:
                step.kill()
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            self.turn(0.1)
            if not self.living:  # with a lost node, srun waits for ever
                until = min(until, time.monotonic() + SRUN)
        self.kill()

    def kill(self) -> None:
        """End their steps at once; on living nodes they are gone within a second or two."""
        self._note_lost()
        for step in filter(None, [self._step, *self._returning.values()]):
            step.kill()

    def _greet(self, sock: socket.socket) -> None:
        """Take in a parent."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end, mine = Channel(sock, self._secret), list[int]()
        if len(self._strangers) >= self.count + STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close()
        self._strangers[end] = time.monotonic()

        def heard(message: Message) -> None:
            if "hello" in message:
                self._strangers.pop(end, None)
                if message.get("protocol") != PROTOCOL:
                    text = "hpcddp: another version of hpcddp runs on {}; resume the run with it"
                    self._written([text.format(message.get("host")).encode()])
                    end.close()
                    return
                if not 0 <= int(message["hello"]) < self.count:
                    raise ValueError(message["hello"])
                mine.append(int(message["hello"]))
                before = self.by_node.get(mine[0])
                losses = before.losses + 1 if before else 0
                self.by_node[mine[0]] = Parent(end, str(message["host"]), losses=losses)
            elif mine and (parent := self.by_node.get(mine[0])) and parent.channel is end:
                if parent.losses and not parent.ready:
                    self._written([f"hpcddp: node {parent.host} is back, as a spare".encode()])
                parent.silent, parent.ready = 0.0, True
                parent.steps = int(message.get("steps", parent.steps))
                self._heard(mine[0], message)

        self.sockets.hear(end, heard)
