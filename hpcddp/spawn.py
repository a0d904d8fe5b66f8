"""The launcher `spawn`: what srun is on a cluster, for one machine and without a scheduler.

    python -P -m hpcddp.spawn NODES GPUS_PER_NODE COMMAND...

Starts nodes x GPUs processes with their ranks in the environment, puts `RANK: ` before each line
of their output, ends the others when one fails, and leaves with the first bad exit code. Nodes are
virtual: all processes run here.
"""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import IO

from hpcddp.topology import Rank, Topology

KILL_WAIT = 10.0  # seconds between TERM and KILL


class Group:
    """The processes of all ranks.

    Args:
        topology: the map.
        command: what each rank runs.
        out: where labelled lines go; what a full disk does not take is lost.
    """

    def __init__(self, topology: Topology, command: list[str], out: IO[bytes]) -> None:
        self.out = out
        self.width = len(str(topology.world_size - 1))
        self.code = 0
        self.parent = os.getppid()
        self.deadline = float("inf")
        self.selector = selectors.DefaultSelector()
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in topology.ranks():
                self.processes[rank.world_rank] = self._start(rank, command)
        except OSError:
            self.signal(signal.SIGKILL)
            raise

    def _start(self, rank: Rank, command: list[str]) -> subprocess.Popen[bytes]:
        environ = {**os.environ, **rank.to_env()}
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        self.selector.register(process.stdout, selectors.EVENT_READ, [rank.world_rank, b""])
        return process

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def end(self) -> None:
        """TERM now, KILL after KILL_WAIT."""
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + KILL_WAIT
            self.signal(signal.SIGTERM)

    def run(self) -> int:
        """Until every rank has left; the first bad exit code, 128 + N for signal N, or 0."""
        while self._watch():
            for key, _ in self.selector.select(timeout=0.1):
                self._read(key)
        for key in list(self.selector.get_map().values()):
            self._read(key)
            if key.data[1]:  # a last line without its end, in a pipe that a grandchild holds open
                self._write_lines(key.data[0], [key.data[1]])
        return self.code

    def _watch(self) -> bool:
        """Look at every rank; whether one still runs."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        bad = [(rank, code) for rank, code in codes.items() if code]
        if bad and not self.code:
            rank, code = bad[0]
            self.code = code if code > 0 else 128 - code
            if code < 0:
                name = signal.Signals(-code).name
                self._write(f"hpcddp: rank {rank} was ended by {name}\n".encode())
            self.end()
        if os.getppid() != self.parent:  # the script is gone: nobody would wait for the ranks
            self.end()
        if time.monotonic() > self.deadline:
            self.signal(signal.SIGKILL)
        return any(code is None for code in codes.values())

    def _read(self, key: selectors.SelectorKey) -> None:
        """Pass on the whole lines that a rank has written."""
        rank, rest = key.data
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return
        lines = (rest + data).split(b"\n")
        key.data[1] = lines.pop() if data else b""
        if not data:
            self.selector.unregister(key.fileobj)
            lines = [line for line in lines if line]
        self._write_lines(rank, lines)

    def _write_lines(self, rank: int, lines: list[bytes]) -> None:
        label = b"%*d: " % (self.width, rank)
        self._write(b"".join(label + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk loses lines, and no rank
            while data:
                data = data[self.out.write(data) or 0 :]
            self.out.flush()


def main(args: list[str]) -> int:
    """Start the ranks; TERM and INT end them, USR2 is passed on."""
    nodes, gpus, *command = args
    ended: list[int] = []  # a signal during the start of the ranks must not miss those to come
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ended.append(number))
    out = io.FileIO(1, "w", closefd=False)  # unbuffered: what is lost must not come up at exit
    group = Group(Topology(int(nodes), int(gpus)), command, out)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: group.end())
    signal.signal(signal.SIGUSR2, lambda number, frame: group.signal(number))
    if ended:
        group.end()
    return group.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
