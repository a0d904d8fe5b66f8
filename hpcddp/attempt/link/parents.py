"""The parents of a job's ranks, one per node: their step, their connections, and who lives.

A parent that is killed closes its connection, at once. One that is silent, as its node has no power
or no network, sends no sign of life. Only time in which this process runs counts as silence: a
suspended job is not lost. Nor is a node whose parent alone gets no processor: as long as ranks
elsewhere make steps, its ranks make them too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcddp.attempt.link.channel import Channel, Message, of_this_user

ADDRESS, SECRET = "HPCDDP_SUPERVISOR", "HPCDDP_SECRET"  # variables of a parent: its supervisor's
LOOK = 0.5  # seconds between two looks
SRUN = 1.0  # seconds for srun to end, after all parents
LEAVE = 5.0  # seconds for the parents to leave


@dataclass
class Parent:
    """A parent.

    Args:
        channel: the connection to it.
        host: the name of its node.
        silent: seconds since its last sign of life, without those in which nobody looked.
        steps: of its ranks, as far as they say.
        lost: why it counts as lost; "" while it lives.
    """

    channel: Channel
    host: str
    silent: float = 0.0
    steps: int = 0
    lost: str = ""


class Parents:
    """The parents of one allocation.

    Args:
        srun: the command that starts one on each node.
        address: of this host, for them.
        heard: called with the node and each of its messages.
        written: called with lines of the ranks, without their ends.
        heartbeat: seconds of silence after which a parent is lost; 0 for no limit.
    """

    def __init__(
        self,
        srun: Sequence[str],
        address: str,
        heard: Callable[[int, Message], None],
        written: Callable[[list[bytes]], None],
        heartbeat: float,
    ) -> None:
        self._srun, self._address, self._heartbeat = srun, address, heartbeat
        self._heard, self._written = heard, written
        self._secret = secrets.token_hex(32)
        self._step: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._port = socket.create_server(("", 0))
        self._clock = time.monotonic()
        self._steps, self._still = -1, 0.0  # of all ranks, and seconds since they became more
        self.by_node: dict[int, Parent] = {}
        self.listen(self._port, self._greet)

    @property
    def living(self) -> list[int]:
        """The nodes whose parent lives, in their order."""
        return sorted(node for node, parent in self.by_node.items() if not parent.lost)

    @property
    def code(self) -> int | None:
        """The exit code of their step; None while it runs, or if there is none."""
        return self._step.poll() if self._step else None

    @property
    def running(self) -> bool:
        """Whether their step runs."""
        return self._step is not None and self._step.poll() is None

    def listen(self, sock: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """Call a function with each new connection to a socket."""

        def accept() -> None:
            with contextlib.suppress(OSError):
                take(sock.accept()[0])

        sock.setblocking(False)
        self._watch(sock.fileno(), accept)

    def hear(self, end: Channel, heard: Callable[[Message], None]) -> None:
        """Call a function with each message of a connection, until it is closed."""
        number = end.fileno()

        def read() -> None:
            for message in end.receive():
                heard(message)
            if end.closed:
                self._selector.unregister(number)

        self._watch(number, read)

    def _watch(self, number: int, read: Callable[[], None]) -> None:
        with contextlib.suppress(KeyError):  # of a closed descriptor with the same number
            self._selector.unregister(number)
        self._selector.register(number, selectors.EVENT_READ, read)

    def turn(self, seconds: float = LOOK) -> None:
        """Wait for what comes, and see who is lost."""
        for key, _ in self._selector.select(seconds):
            key.data()
        now = time.monotonic()
        passed, self._clock = min(now - self._clock, 2 * LOOK), now
        steps = sum(parent.steps for parent in self.by_node.values())
        self._still = 0.0 if steps != self._steps else self._still + passed
        self._steps = steps
        for parent in self.by_node.values():
            parent.silent += passed
            if parent.channel.closed:
                parent.lost = parent.lost or "its connection is closed"
            elif 0 < self._heartbeat < min(parent.silent, self._still):
                parent.lost = f"no sign of life for {parent.silent:.0f} s"
                parent.channel.close()  # if it wakes up, it ends its ranks

    def start(self, environ: Mapping[str, str]) -> None:
        """Start a parent on each node."""
        self.by_node = {}
        where = {ADDRESS: f"{self._address}:{self._port.getsockname()[1]}", SECRET: self._secret}
        self._step = subprocess.Popen(
            self._srun, env={**environ, **where}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._step.stdout
        out, rest = self._step.stdout, [b""]

        def copy() -> None:
            data = os.read(out.fileno(), 1 << 16)
            *lines, rest[0] = (rest[0] + data).split(b"\n")
            if not data:
                self._selector.unregister(out.fileno())
                out.close()
                lines = [rest[0]] if rest[0] else []
            self._written(lines)

        self._watch(out.fileno(), copy)

    def dismiss(self, seconds: float = LEAVE) -> None:
        """Let them leave, once their ranks have ended, and end what is left of their step."""
        for parent in self.by_node.values():
            parent.channel.send(leave=True)
        until = time.monotonic() + seconds
        while self.running and time.monotonic() < until:
            self.turn(0.1)
            if not self.living:  # with a lost node, srun waits for ever
                until = min(until, time.monotonic() + SRUN)
        self.kill()

    def kill(self) -> None:
        """End their step at once; on living nodes they are gone within a second or two."""
        if self._step:
            self._step.send_signal(signal.SIGKILL)
            self._step.wait()

    def _greet(self, sock: socket.socket) -> None:
        """Take in a parent."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end, mine = Channel(sock, self._secret), list[int]()

        def heard(message: Message) -> None:
            if "hello" in message:
                mine.append(int(message["hello"]))
                self.by_node[mine[0]] = Parent(end, str(message["host"]))
            elif mine and (parent := self.by_node.get(mine[0])) and parent.channel is end:
                parent.silent = 0.0
                parent.steps = int(message.get("steps", parent.steps))
                self._heard(mine[0], message)

        self.hear(end, heard)


def own(sock: socket.socket) -> bool:
    """Whether a connection on this machine is of this user; another one is closed."""
    if not of_this_user(sock):
        sock.close()
        return False
    return True
