"""The processes of ranks on this machine, with labels, signals and end as from srun."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

from hpcddp.attempt.error_record import host
from hpcddp.attempt.exit_codes import FAILED
from hpcddp.attempt.joblog import labelled, rank_ended
from hpcddp.attempt.link.channel import Channel
from hpcddp.errors import RunError
from hpcddp.launch.command import job_of
from hpcddp.launch.orphans import Orphans
from hpcddp.rundir import read_json
from hpcddp.topology import Rank

KILL_WAIT = 10.0  # seconds between TERM and KILL
WAIT = 600.0  # seconds between the first rank's end and the last's, as for srun in the templates
LOOK = 0.5  # seconds between two looks at the run folder
TURN = 0.1  # seconds between two looks at the ranks
# Signals that end a rank for its own reasons, not as another one is gone: no memory, full disk.
CAUSES = (-signal.SIGKILL, -signal.SIGBUS)


def patience(environ: Mapping[str, str]) -> float:
    """WAIT for a task, whose ranks leave together; a program's ranks may stay."""
    return float("inf") if job_of(environ.get("HPCDDP_RUN_DIR", os.devnull)) else WAIT


class Process(Protocol):
    """The part of subprocess.Popen that a group uses."""

    pid: int
    stdout: IO[bytes] | None

    def poll(self) -> int | None:
        """The exit code, -N for signal N; None while it runs."""

    def send_signal(self, sig: int) -> None:
        """Send a signal, if the process still runs."""


class Group:
    """The processes of some ranks.

    Args:
        ranks: those that run here.
        start: makes a rank's process, with its output in a pipe; in a fork of this process it
            raises a BaseException that is no Exception.
        out: the destination of the lines; on a full disk they are lost.
        label: put `RANK: ` before each line.
        request: the run folder's file with a user's request, if no other process passes it on.
        kill_wait: seconds between TERM and KILL.
        wait: seconds that ranks may run on after the first one has left.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        start: Callable[[Rank], Process],
        out: IO[bytes],
        *,
        label: bool = True,
        request: Path | None = None,
        kill_wait: float | None = None,
        wait: float = WAIT,
    ) -> None:
        self.out, self.label, self.request = out, label, request
        self.kill_wait = KILL_WAIT if kill_wait is None else kill_wait
        self.width = len(str(ranks[0].world_size - 1))
        self.code = 0
        self.holds = False  # a failed rank ends no other one
        self.named: set[int] = set()  # ranks whose end by a signal was printed
        self.parent = os.getppid()
        self.deadline = self.late = float("inf")
        self.wait = wait
        self.next_look = 0.0  # at the request; never again after it was seen
        self.selector = selectors.DefaultSelector()
        self.processes: dict[int, Process] = {}
        self.orphans = Orphans()
        self.alone = float("inf")  # since when no rank runs
        try:
            for rank in ranks:
                self._add(rank, start(rank))
        except OSError:
            self.signal(signal.SIGKILL)
            raise
        except BaseException:  # in a fork of this process, which is a rank itself
            self._forget()
            raise

    def _add(self, rank: Rank, process: Process) -> None:
        self.processes[rank.world_rank] = process
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        self.selector.register(process.stdout, selectors.EVENT_READ, [rank.world_rank, b""])

    def _forget(self) -> None:
        self.selector.close()
        for process in self.processes.values():
            if process.stdout:
                process.stdout.close()

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs, and to the orphans of others."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)
        self.orphans.tell(number)

    def kill(self, ranks: Sequence[int]) -> None:
        """Kill ranks that are not the cause of a failure."""
        self.named |= {*ranks}
        self.code = self.code or FAILED
        for rank in ranks:
            self.processes[rank].send_signal(signal.SIGKILL)

    def end(self) -> None:
        """Send TERM now, and KILL after ``kill_wait``."""
        if self.deadline == float("inf"):
            self.deadline = time.monotonic() + self.kill_wait
            self.signal(signal.SIGTERM)

    def run(self) -> int:
        """Wait until every rank has left; the first bad exit code, 128 + N for signal N, or 0. Of
        ranks that are seen to end together, a killed one counts as the first."""
        while self.turn():
            pass
        return self.finish()

    def turn(self, seconds: float = TURN) -> bool:
        """Look at every rank, and write their new lines; whether one still runs.

        Args:
            seconds: to wait for lines, or the end of a rank.
        """
        runs = self._watch() or self._leaves()
        for key, _ in self.selector.select(timeout=seconds if runs else 0):
            if key.data:
                self._read(key)
        return runs

    def hear(self, connection: Channel) -> None:
        """Let ``turn`` end as well when something comes over a connection."""
        self.selector.register(connection, selectors.EVENT_READ)

    def finish(self) -> int:
        """Once no rank runs: end what they have left, and write the last lines; the exit code."""
        self.orphans.kill()
        for key in [key for key in self.selector.get_map().values() if key.data]:
            self._read(key)
            if key.data[1]:  # an unfinished last line, in a pipe that a grandchild holds open
                self._write_lines(key.data[0], [key.data[1]])
        self._forget()
        return self.code

    def _leaves(self) -> bool:
        """Whether an orphan that got a stop signal still runs after all ranks."""
        now = time.monotonic()
        self.alone = min(self.alone, now)
        left = self.orphans.look(self._pids(), now=True)
        return left and now < min(self.alone + self.kill_wait, self.deadline)

    @property
    def left(self) -> list[int]:
        """The global ranks that still run."""
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def _pids(self) -> set[int]:
        return {process.pid for process in self.processes.values()}

    def _watch(self) -> bool:
        """Look at every rank; whether one still runs."""
        codes = {rank: process.poll() for rank, process in self.processes.items()}
        # A killed rank comes first: the others only lost it.
        bad = sorted(
            ((rank, code) for rank, code in codes.items() if code),
            key=lambda end: end[1] not in CAUSES,
        )
        for rank, code in bad if self.code else bad[:1]:
            self._tell(rank, code)
        if bad and not self.code:
            code = bad[0][1]
            self.code = code if code > 0 else 128 - code
            if not self.holds:
                self.end()
        self._pass_on()
        self.orphans.look(self._pids())
        self._wait_for_the_rest(codes)
        if os.getppid() != self.parent:  # the script that waits for the ranks has ended
            self.end()
        if time.monotonic() > self.deadline:
            self.signal(signal.SIGKILL)
        return any(code is None for code in codes.values())

    def _tell(self, rank: int, code: int) -> None:
        """Print that a signal ended a rank, unless this group sent it."""
        late = code == -signal.SIGKILL and time.monotonic() > self.deadline
        ours = self.code and (code not in CAUSES or late)
        if code < 0 and not ours and rank not in self.named:
            self.named.add(rank)
            name = signal.Signals(-code).name
            self._write(f"{rank_ended(rank, host(), name)}\n".encode())

    def _wait_for_the_rest(self, codes: dict[int, int | None]) -> None:
        """End ranks that hang at their end, long after another one has left."""
        if self.holds and self.code:  # others may have to save first
            return
        left = [rank for rank, code in codes.items() if code is not None]
        if left and self.late == float("inf"):
            self.late = time.monotonic() + self.wait
        if time.monotonic() > self.late and self.deadline == float("inf"):
            rest = ", ".join(str(rank) for rank, code in codes.items() if code is None)
            since = f"{self.wait:.0f} s after another rank ended"
            who, them = ("ranks", "them") if "," in rest else ("rank", "it")
            text = f"hpcddp: {who} {rest} on {host()} still ran {since}: ending {them}"
            self._write(f"{text}\n".encode())
            self.end()

    def _pass_on(self) -> None:
        """Signal a user's request to the ranks, as Slurm would."""
        if self.request is None or (clock := time.monotonic()) < self.next_look:
            return
        self.next_look = clock + LOOK
        with contextlib.suppress(RunError):
            if (read_json(self.request) or {}).get("want") in ("stop", "preempt"):
                self.next_look = float("inf")
                self.signal(signal.SIGUSR2)

    def _read(self, key: selectors.SelectorKey) -> None:
        """Write the whole lines of a rank's new output."""
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
        if self.label:
            self._write(b"".join(labelled(rank, self.width, line) for line in lines))
        else:
            self._write(b"".join(line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk loses lines, not ranks
            while data:
                data = data[self.out.write(data) or 0 :]
            self.out.flush()
