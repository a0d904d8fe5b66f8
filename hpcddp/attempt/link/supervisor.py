"""The supervisor of the parents of a job's ranks, on the host of the batch script.

It starts a parent on each node (launch/parent.py) with one srun, and outlives attempts as they do:
it is gone when the batch script is, or leaves before the job ends or is requeued. For each attempt
it orders parents to fork the ranks, ends all ranks when one has failed, and answers with the exit
code of the first one. The attempt's part of this is supervised.py.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from hpcddp import processes
from hpcddp.attempt.exit_codes import ALONE, FAILED, HUNG, SIGKILLED, TERMINATED
from hpcddp.attempt.link import rank_lines
from hpcddp.attempt.link.channel import Channel, Message, own
from hpcddp.attempt.link.log_writer import LogWriter
from hpcddp.attempt.link.newest_step import DECIDE, HURRY, NewestStep, NodeShares
from hpcddp.attempt.link.parents import LOOK, RETURN, STUCK, Parents
from hpcddp.attempt.link.running_ranks import RunningRanks
from hpcddp.rundir import RunDir

LATE = 15.0  # seconds after KILL until a parent that was told to end its ranks counts as lost
SLOW = 20.0  # seconds that a spare node may take longer to start its parent than the others
LINES = 2.0  # seconds for the last lines of ranks that have ended


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
        self._log = LogWriter()
        self.parents = Parents(srun, count, address, self._heard, self._write, heartbeat)
        self.parents.sockets.listen(door, self._ask)
        self.waiting: RunningRanks | None = None  # until the ranks of the one before have ended
        self.running: RunningRanks | None = None
        self.signalled = 0  # a stop signal of Slurm that found no ranks
        self.leaving = not self.started

    def serve(self) -> None:
        """Work until the script is gone, or nothing more is to be done."""
        look = back = 0.0
        while not self.leaving:
            self.parents.turn()
            if self.waiting and not self.running:
                self.running, self.waiting = self.waiting, None
                self._begin(self.running)
            if self.running:
                self._check(self.running)
            if (now := time.monotonic()) >= look:
                look = now + LOOK
                self.leaving |= processes.start_of(self.script) != self.started
            if now >= back:
                back = now + RETURN
                if self.running and self._spares:
                    self.parents.call_back(self.running.without)
        seconds = []
        if self.running:
            self._end(self.running, TERMINATED)
            seconds = [self.running.kill_wait + LATE]
        self.parents.dismiss(*seconds)

    def _ask(self, sock: socket.socket) -> None:
        """Take in a process of this machine."""
        if not own(sock):
            return
        end = Channel(sock)

        def heard(message: Message) -> None:
            if "start" in message:
                self.waiting = RunningRanks(message.pop("start"), end, **message)
            elif "leave" in message:
                self.leaving = True
            elif now := next(
                (x for x in (self.running, self.waiting) if x and x.asker is end), None
            ):
                self._stop(now, message)

        self.parents.sockets.hear(end, heard)

    def _stop(self, now: RunningRanks, message: Message) -> None:
        """Pass a stop signal on, or end the ranks; those that do not run yet are never started."""
        if "signal" in message and now.nodes:
            self._tell(now, message)
        else:
            self._end(now, 128 + int(message.get("signal", signal.SIGTERM)))

    def _begin(self, now: RunningRanks) -> None:
        """Prepare an attempt: its log, and parents that live."""
        if self.parents.count - len(lost := self.parents.lost) < now.least:
            now.lost |= lost
            self._finish(now, SIGKILLED)
            return
        if self.parents.running and len(self.parents.living) < now.least:
            self.parents.dismiss()
        now.began, self.parents.attempt = time.monotonic(), now.number
        self._log.open(RunDir(now.environ["HPCDDP_RUN_DIR"]).attempt(now.number).log)
        if not self.parents.running:
            try:
                self.parents.start(os.environ)
            except OSError as error:
                self._say(f"cannot start the parents of the ranks: {error}")
                self._finish(now, 127)

    def _heard(self, node: int, message: Message) -> None:
        now = self.running
        if "stopped" in message:
            self._stopped(now, node, int(message["stopped"]))
        elif now and message.get("ended") == now.number:
            if message.get("stuck"):
                self._lose(now, node, STUCK)
            self._ended(now, node, int(message["code"]))
        elif now and message.get("failed") == now.number:
            self._failed(now, int(message["code"]))
        elif now and now.newest and message.get("held") == now.number:
            now.newest.held[node] = NodeShares.of(message)

    def _stopped(self, now: RunningRanks | None, node: int, number: int) -> None:
        """A parent got a stop signal while it had no ranks: they may be ordered at this moment, or
        be those of the next attempt. Those of other nodes have got their own."""
        if now and node in now.nodes and node not in now.codes:
            self.parents.by_node[node].channel.send(signal=number)
        elif now is None or not now.nodes or node in now.codes:
            self.signalled = 128 + number

    def _lose(self, now: RunningRanks, node: int, why: str) -> None:
        """Note that a node is lost."""
        parent = self.parents.by_node[node]
        now.lost[parent.host] = parent.lost = parent.lost or why
        self._say(f"lost node {parent.host}: {parent.lost}")

    def _say(self, text: str) -> None:
        self._write([f"hpcddp: {text}".encode()])

    def _write(self, lines: list[bytes]) -> None:
        """Write lines of the ranks into the log of the attempt."""
        text, ended = rank_lines.sift(lines, spares=self._spares)
        if now := self.running:
            now.written |= {node for attempt, node in ended if attempt == now.number}
        self._log.write(text)

    @property
    def _spares(self) -> bool:
        """Whether the job continues when a node is lost."""
        now = self.running
        return now is not None and now.least < self.parents.count

    def _check(self, now: RunningRanks) -> None:
        """Start the ranks once the parents are there, and see what has been lost."""
        if not self.parents.running:
            self._finish(now, now.code or self.parents.code or 1)
            return
        if now.asker.closed:
            self._end(now, TERMINATED)
        if not now.nodes:
            self._order(now)
            return
        if now.newest:
            self._rescue(now, now.newest)
        for node in now.nodes:
            if self.parents.by_node[node].lost and node not in now.codes:
                self._lose(now, node, "")
                self._ended(now, node, SIGKILLED)
                now.written.add(node)
        if len(now.codes) == len(now.nodes):
            now.deadline = min(now.deadline, time.monotonic() + LINES)
        if len(now.codes) == len(now.written) == len(now.nodes) and self._log.idle:
            self._finish(now, now.code)
        elif time.monotonic() > now.deadline:
            self._give_up(now)
        elif time.monotonic() > now.late and not now.newest:
            now.late = float("inf")
            self._say(f"ranks still ran {now.wait:.0f} s after those of another node: ending them")
            self._end(now, TERMINATED)

    def _give_up(self, now: RunningRanks) -> None:
        """End an attempt whose ranks do not: their nodes are not used again."""
        for node in now.nodes:
            if node not in now.codes:
                self._lose(now, node, STUCK)
        if len(now.codes) < len(now.nodes):
            self.parents.kill()
        self._finish(now, now.code or SIGKILLED * (len(now.codes) < len(now.nodes)))

    def _order(self, now: RunningRanks) -> None:
        """Order the ranks of an attempt, once all parents can fork them, or enough do in time."""
        late = time.monotonic() > now.began + now.patience
        if stop := now.code or self.signalled:
            self.signalled = 0
            self._finish(now, stop)
            return
        if not (self.parents.ready or late or self._enough(now)):
            return
        here, able = self.parents.by_node, self.parents.able(now.without)
        if len(able) < now.least:
            if not late and any(not here[node].ready for node in self.parents.living):
                return  # a node is coming back
            now.lost |= self.parents.missing
            self._say(f"{len(able)} of {self.parents.count} nodes can start ranks"
                      f"{f' after {now.patience:.0f} s' if late else ''}")  # fmt: skip
            self.parents.kill()
            self._finish(now, 1)
            return
        self.parents.active = {*able[: now.most]}
        now.start({node: here[node] for node in sorted(self.parents.active)})

    def _enough(self, now: RunningRanks) -> bool:
        """Whether another node is slow, while enough can fork ranks."""
        if len(self.parents.able(now.without)) < now.most:
            now.enough = float("inf")
        now.enough = min(now.enough, time.monotonic() + SLOW)
        return time.monotonic() > now.enough

    def _ended(self, now: RunningRanks, node: int, code: int) -> None:
        """The ranks of a node have ended; a bad exit code ends all others."""
        if node in now.codes:
            return
        now.codes[node] = code
        now.late = min(now.late, time.monotonic() + (now.wait or float("inf")))
        if now.newest:
            now.newest.held.pop(node, None)
            now.newest.nodes -= 1
        if code:
            self._failed(now, code)

    def _failed(self, now: RunningRanks, code: int) -> None:
        """Ranks have failed: the others end, once one of them has saved the newest step, if one
        can."""
        # A rank that was killed, not by us, is the cause, whichever rank has noticed it first.
        killed = code > 128 and code != TERMINATED and time.monotonic() < now.deadline - LATE
        if now.code == 0 or (now.code == FAILED and killed):
            now.code = code
        if now.failed:
            return
        now.failed = time.time()
        if code not in ALONE:
            left = len(now.nodes) - len(now.codes)
            patience = HURRY if code == HUNG else DECIDE
            now.newest = NewestStep(left, time.monotonic(), patience)
            self._tell(now, {"alarm": True})
        else:
            self._end(now, code)

    def _rescue(self, now: RunningRanks, newest: NewestStep) -> None:
        """Choose the ranks that save, once all that are left tell which step they hold."""
        chosen = newest.verdict(time.monotonic())
        if chosen is None:
            return
        self._tell(now, {"verdict": chosen})
        if not chosen:
            now.newest = None
            self._end(now, now.code)

    def _end(self, now: RunningRanks, code: int) -> None:
        """End the ranks that still run: TERM, and KILL after some time.

        Args:
            code: the exit code of an attempt whose ranks have not started; they never do.
        """
        if not now.nodes:
            now.code = now.code or code
        elif now.deadline == float("inf"):
            now.deadline = time.monotonic() + now.kill_wait + LATE
            self._tell(now, {"end": True})

    def _tell(self, now: RunningRanks, order: dict[str, Any]) -> None:
        """Pass an order on to the parents whose ranks run."""
        for node in now.nodes:
            if node not in now.codes:
                self.parents.by_node[node].channel.send(**order)

    def _finish(self, now: RunningRanks, code: int) -> None:
        """Answer the attempt: all its ranks have ended."""
        usable = [self.parents.by_node[node].host for node in self.parents.living]
        code = code if code >= 0 else 128 - code
        now.asker.send(ended=code, lost=now.lost, usable=usable, failed=now.failed or time.time())
        self.running, self.parents.active = None, set()
