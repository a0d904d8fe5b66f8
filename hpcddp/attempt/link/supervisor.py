"""The supervisor of the parents of a job's ranks, on the host of the batch script.

It starts a parent on each node (launch/parent.py) with one srun, and outlives attempts as they do:
it is gone when the batch script is, or leaves before the job ends or is requeued. For each attempt
it orders parents to fork the ranks, ends all ranks when one has failed, and answers with the exit
code of the first one. The attempt's part of this is supervised.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcddp import processes
from hpcddp.attempt.link.channel import Channel, Message
from hpcddp.attempt.link.parents import LOOK, Parents, own
from hpcddp.rundir import RunDir

LATE = 45.0  # seconds after which a parent that was told to end its ranks counts as lost
LINES = 2.0  # seconds for the last lines of ranks that have ended
GONE = 128 + signal.SIGKILL  # the exit code of a node without a parent
END = b"\x1e"  # begins a line that is not for the log


def end_of_lines(attempt: int, node: int) -> bytes:
    """The line, without a rank's label, that follows the last line of a node's ranks."""
    return END + f"{attempt} {node}".encode()


@dataclass
class Running:
    """The attempt whose ranks run.

    Args:
        asker: the connection to the process that waits for their end.
        least, most: the number of its nodes.
        nodes: these nodes, in the order of the ranks; empty until all parents are there.
        codes: exit code by node, of those that have ended.
        written: the nodes whose last lines are in the log.
        code: of the node that failed first.
        deadline: for the ranks that have been told to end.
    """

    number: int
    asker: Channel
    least: int
    most: int
    environ: dict[str, str]
    nodes: list[int] = field(default_factory=list)
    codes: dict[int, int] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    code: int = 0
    deadline: float = float("inf")


class Supervisor:
    """The supervisor of one batch script.

    Args:
        door: where attempts ask, on this machine.
        script: process id of the batch script.
        srun: the command that starts the parents.
        address: of this host, for the parents.
        count: the nodes of the allocation; those beyond an attempt's size are spares.
        heartbeat: seconds of silence after which a node is lost; 0 for no limit.
    """

    def __init__(
        self,
        door: socket.socket,
        script: int,
        srun: Sequence[str],
        address: str,
        count: int,
        heartbeat: float,
    ) -> None:
        self.script, self.started = script, processes.start_of(script)
        self.parents = Parents(srun, address, self._heard, self._write, heartbeat)
        self.parents.listen(door, self._ask)
        self.count = count
        self.running: Running | None = None
        self.leaving = False

    def serve(self) -> None:
        """Work until the script is gone, or nothing more is to be done."""
        look = 0.0
        while not self.leaving:
            self.parents.turn()
            self._check()
            if (now := time.monotonic()) >= look:
                look = now + LOOK
                self.leaving |= processes.start_of(self.script) != self.started
        if self.running:
            self._end(self.running)
        self.parents.dismiss(*([LATE] if self.running else []))

    def _ask(self, sock: socket.socket) -> None:
        """Take in a process of this machine."""
        if not own(sock):
            return
        end = Channel(sock)

        def heard(message: Message) -> None:
            if "start" in message:
                self._start(end, **message)
            elif "leave" in message:
                self.leaving = True
            else:
                self._tell(message)

        self.parents.hear(end, heard)

    def _start(
        self, asker: Channel, start: int, least: int, most: int, environ: dict[str, str]
    ) -> None:
        """Run the ranks of an attempt, as soon as its parents are there."""
        with contextlib.suppress(OSError):  # else its lines are in the log of the one before
            log = RunDir(environ["HPCDDP_RUN_DIR"]).attempt(start).log
            new = os.open(log, os.O_WRONLY | os.O_APPEND)
            for old in (1, 2):
                os.dup2(new, old)
            os.close(new)
        self.parents.turn(0)  # one of them may be lost by now
        if self.parents.running and len(self.parents.living) < least:
            self.parents.dismiss()
        if not self.parents.running:
            self.parents.start(os.environ)
        self.running = Running(start, asker, least, most, environ)

    def _heard(self, node: int, message: Message) -> None:
        if "ended" in message:
            self._ended(node, int(message["code"]), int(message["ended"]))

    def _write(self, lines: list[bytes]) -> None:
        """Write lines of the ranks into the log of the attempt."""
        if now := self.running:
            ends = {end_of_lines(now.number, node): node for node in now.nodes}
            now.written.update(ends[line] for line in lines if line in ends)
        with contextlib.suppress(OSError):  # a full disk loses lines, not ranks
            os.write(1, b"".join(line + b"\n" for line in lines if not line.startswith(END)))

    def _check(self) -> None:
        """Start the ranks once the parents are there, and see what has been lost."""
        now = self.running
        if now is None:
            return
        if not self.parents.running:
            self._finish(now.code or self.parents.code or 1)
            return
        if now.asker.closed:
            self._end(now)
        if not now.nodes:
            self._order(now)
        for node in now.nodes:
            parent = self.parents.by_node[node]
            if parent.lost and node not in now.codes:
                print(f"hpcddp: lost node {parent.host}: {parent.lost}", flush=True)
                self._ended(node, GONE, now.number)
                now.written.add(node)
        if now.nodes and len(now.codes) == len(now.nodes):
            now.deadline = min(now.deadline, time.monotonic() + LINES)
        done = now.nodes and len(now.codes) == len(now.written) == len(now.nodes)
        if done or time.monotonic() > now.deadline:
            if len(now.codes) < len(now.nodes):
                self.parents.kill()  # what does not end is not used again
            self._finish(now.code)

    def _order(self, now: Running) -> None:
        """Order the ranks of an attempt, once all parents have come, or enough live of those that
        did."""
        here = self.parents.by_node
        if len(here) < self.count:
            return
        now.nodes = self.parents.living[: now.most]
        if len(now.nodes) < now.least:
            self._finish(GONE)
            return
        for index, node in enumerate(now.nodes):
            here[node].channel.send(
                start=now.number, node=index, nodes=len(now.nodes), environ=now.environ
            )

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
        now = self.running
        for node in now.nodes if now else ():
            if now and node not in now.codes:
                self.parents.by_node[node].channel.send(**order)

    def _finish(self, code: int) -> None:
        """Answer the attempt: all its ranks have ended."""
        if now := self.running:
            parents = [self.parents.by_node[node] for node in now.nodes]
            lost = {parent.host: parent.lost for parent in parents if parent.lost}
            ended, left = code if code >= 0 else 128 - code, len(self.parents.living)
            now.asker.send(ended=ended, lost=lost, left=left)
        self.running = None
