"""The supervisor of the parents of a job's ranks, on the host of the batch script.

It starts a parent on each node (launch/parent.py) with one srun, and outlives attempts as they do:
it is gone when the batch script is, or leaves before the job ends or is requeued. For each attempt
it orders the parents to fork the ranks, ends all ranks when one has failed, and answers with the
exit code of the first one. The attempt's part of this is supervised.py.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcddp import processes
from hpcddp.attempt.link.channel import Channel, Message, of_this_user
from hpcddp.rundir import RunDir

LOOK = 0.5  # seconds between two looks at the script
LINES = 2.0  # seconds for the last lines of ranks that have ended
END = b"\x1e"  # begins a line that is not for the log
ADDRESS, SECRET = "HPCDDP_SUPERVISOR", "HPCDDP_SECRET"  # variables of a parent: its supervisor's
LEAVE = 5.0  # seconds for the parents to leave
LATE = 45.0  # seconds after which a parent that was told to end its ranks counts as lost
GONE = 128 + signal.SIGKILL  # the exit code of a node without a parent


def end_of_lines(attempt: int, node: int) -> bytes:
    """The line, without a rank's label, that follows the last line of a node's ranks."""
    return END + f"{attempt} {node}".encode()


@dataclass
class Running:
    """The attempt whose ranks run.

    Args:
        asker: the connection to the process that waits for their end.
        codes: exit code by node, of those that have ended.
        written: the nodes whose last lines are in the log.
    """

    number: int
    asker: Channel
    nodes: int
    environ: dict[str, str]
    codes: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    code: int = 0  # of the node that failed first
    ordered: bool = False  # all parents have been told to start
    deadline: float = float("inf")  # for the ranks that have been told to end


class Supervisor:
    """The supervisor of one batch script.

    Args:
        door: where attempts ask, on this machine.
        script: process id of the batch script.
        srun: the command that starts the parents.
        address: of this host, for the parents.
    """

    def __init__(self, door: socket.socket, script: int, srun: Sequence[str], address: str) -> None:
        self.script, self.started = script, processes.start_of(script)
        self.srun, self.address = srun, address
        self.secret = secrets.token_hex(32)
        self.port = socket.create_server(("", 0))
        self.selector = selectors.DefaultSelector()
        self.parents: dict[int, Channel] = {}
        self.running: Running | None = None
        self.step: subprocess.Popen[bytes] | None = None
        self.leaving = False
        self._listen(door, self._ask)
        self._listen(self.port, self._greet)

    def serve(self) -> None:
        """Work until the script is gone, or nothing more is to be done."""
        look = 0.0
        while not self.leaving:
            for key, _ in self.selector.select(LOOK):
                key.data()
            self._check()
            if (now := time.monotonic()) >= look:
                look = now + LOOK
                self.leaving |= processes.start_of(self.script) != self.started
        self._dismiss()

    def _listen(self, sock: socket.socket, take: Callable[[socket.socket], None]) -> None:
        def accept() -> None:
            with contextlib.suppress(OSError):
                take(sock.accept()[0])

        sock.setblocking(False)
        self.selector.register(sock, selectors.EVENT_READ, accept)

    def _hear(self, end: Channel, heard: Callable[[Message], None]) -> None:
        """Call a function for each message of a connection, until it is closed."""

        def read() -> None:
            before = end.fileno()
            for message in end.receive():
                heard(message)
            if end.closed:
                self.selector.unregister(before)

        self.selector.register(end.fileno(), selectors.EVENT_READ, read)

    def _ask(self, sock: socket.socket) -> None:
        """Take in a process of this machine."""
        if not of_this_user(sock):
            sock.close()
            return
        end = Channel(sock)

        def heard(message: Message) -> None:
            if "start" in message:
                self._start(end, **message)
            elif "leave" in message:
                self.leaving = True
            else:
                self._tell(message)

        self._hear(end, heard)

    def _greet(self, sock: socket.socket) -> None:
        """Take in a parent."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end, nodes = Channel(sock, self.secret), list[int]()

        def heard(message: Message) -> None:
            if "hello" in message:
                nodes.append(int(message["hello"]))
                self.parents[nodes[0]] = end
            elif "ended" in message and nodes:
                self._ended(nodes[0], int(message["code"]), int(message["ended"]))

        self._hear(end, heard)

    def _start(self, asker: Channel, start: int, nodes: int, environ: dict[str, str]) -> None:
        """Run the ranks of an attempt, as soon as all parents are there."""
        self.running = Running(start, asker, nodes, environ)
        with contextlib.suppress(OSError):  # else its lines are in the log of the one before
            log = RunDir(environ["HPCDDP_RUN_DIR"]).attempt(start).log
            new = os.open(log, os.O_WRONLY | os.O_APPEND)
            for old in (1, 2):
                os.dup2(new, old)
            os.close(new)
        if any(parent.closed for parent in self.parents.values()):
            self._dismiss()
        if self.step is None or self.step.poll() is not None:
            self._start_parents()

    def _start_parents(self) -> None:
        self.parents = {}
        where = {ADDRESS: f"{self.address}:{self.port.getsockname()[1]}", SECRET: self.secret}
        self.step = subprocess.Popen(
            self.srun, env={**os.environ, **where}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self.step.stdout
        out, rest = self.step.stdout, [b""]

        def copy() -> None:
            data = os.read(out.fileno(), 1 << 16)
            *lines, rest[0] = (rest[0] + data).split(b"\n")
            if not data:
                self.selector.unregister(out)
                out.close()
                lines = [rest[0]] if rest[0] else []
            self._write(lines)

        self.selector.register(out, selectors.EVENT_READ, copy)

    def _write(self, lines: list[bytes]) -> None:
        """Write lines of the ranks into the log of the attempt."""
        now = self.running
        ends = {end_of_lines(now.number, node): node for node in self.parents} if now else {}
        if now:
            now.written.update(ends[line] for line in lines if line in ends)
        with contextlib.suppress(OSError):  # a full disk loses lines, not ranks
            os.write(1, b"".join(line + b"\n" for line in lines if not line.startswith(END)))

    def _check(self) -> None:
        """Start the ranks once all parents are there, and see what has been lost."""
        now = self.running
        if now is None:
            return
        if self.step and self.step.poll() is not None:
            self._finish(now.code or self.step.returncode or 1)
            return
        if now.asker.closed:
            self._end(now)
        if not now.ordered and len(self.parents) == now.nodes:
            now.ordered = True
            for node, parent in self.parents.items():
                parent.send(start=now.number, node=node, nodes=now.nodes, environ=now.environ)
        for node, parent in self.parents.items():
            if parent.closed and now.ordered:
                self._ended(node, GONE, now.number)
                now.written.add(node)
        if len(now.codes) == now.nodes:
            now.deadline = min(now.deadline, time.monotonic() + LINES)
        if len(now.codes) == len(now.written) == now.nodes or time.monotonic() > now.deadline:
            if len(now.codes) < now.nodes and self.step:
                self.step.kill()  # what does not end is not used again
            self._finish(now.code)

    def _ended(self, node: int, code: int, attempt: int) -> None:
        """The ranks of a node have ended; a bad exit code ends all others."""
        now = self.running
        if now is None or node in now.codes or attempt != now.number:
            return
        now.codes[node] = code
        if code and not now.code:
            now.code = code
            self._end(now)

    def _end(self, now: Running) -> None:
        """End the ranks that still run: TERM, and KILL after some time."""
        if now.deadline == float("inf"):
            now.deadline = time.monotonic() + LATE
            self._tell({"end": True})

    def _tell(self, order: dict[str, Any]) -> None:
        """Pass an order on to the parents whose ranks run."""
        ended = self.running.codes if self.running else ()
        for node, parent in self.parents.items():
            if node not in ended:
                parent.send(**order)

    def _finish(self, code: int) -> None:
        """Answer the attempt: all its ranks have ended."""
        if self.running:
            self.running.asker.send(ended=code if code >= 0 else 128 - code)
        self.running = None

    def _dismiss(self) -> None:
        """Let the parents leave, with their ranks, and end what is left of them."""
        if self.running:
            self._end(self.running)
        for parent in self.parents.values():
            parent.send(leave=True)
        if self.step:
            until = time.monotonic() + (LATE if self.running else LEAVE)
            while self.step.poll() is None and time.monotonic() < until:
                for key, _ in self.selector.select(0.1):
                    key.data()
            self.step.kill()
            self.step.wait()
