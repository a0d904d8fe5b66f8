"""What the parent of a node's ranks does: it forks them, watches them, and obeys the supervisor.

What it does with the ranks of one attempt is that of children.py.
"""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import time
from contextlib import suppress
from typing import Any

from hpcddp import cgroups
from hpcddp.attempt import exit_codes
from hpcddp.attempt.error_record import host
from hpcddp.attempt.link import slots
from hpcddp.attempt.link.channel import Channel, Message
from hpcddp.attempt.link.own_decision import OwnDecision
from hpcddp.attempt.link.rank_lines import end_of_lines
from hpcddp.attempt.link.slots import NodeSlots
from hpcddp.launch import fork
from hpcddp.launch.children import Group, patience
from hpcddp.launch.orphans import Ending
from hpcddp.preempt import stop_signals
from hpcddp.rundir import RunDir
from hpcddp.sizes import counted
from hpcddp.topology import Rank, Topology

BEAT = 0.5  # seconds between two signs of life
LOOK = 0.2  # seconds between two looks at the ranks; their lines and all orders are seen at once
SOON = 0.05  # the same after a failure
MORE = 20.0  # seconds that the supervisor may be silent longer: it may wait for a disk
ABLE = {slots.ARMED, slots.WAITS, slots.HUNG}  # phases of ranks that may save their step
CALLS = {slots.WAITS, slots.HUNG}  # phases of ranks that have seen a failure
DEAF = {slots.ARMED, slots.HUNG}  # phases of ranks that have not heard an alarm


class NodeParent:
    """The parent of the ranks of one node.

    Args:
        supervisor: the connection to it.
        node: its number in the step.
        ranks: of this node.
        heartbeat: seconds of silence after which the supervisor's node is lost; 0 for no limit.
    """

    def __init__(self, supervisor: Channel, node: int, ranks: int, heartbeat: float) -> None:
        self.supervisor, self.node, self.ranks = supervisor, node, ranks
        self.heartbeat = heartbeat
        self.group: Group | None = None
        self.leaving, self.attempt = False, 0  # that of its ranks
        self.newest = int(os.environ.get("HPCDDP_ATTEMPT", "1"))  # of the job
        self.slots = NodeSlots(ranks)
        os.environ[slots.NAME] = str(self.slots.descriptor)
        self._next_beat = self._silent = 0.0
        self._clock = time.monotonic()
        self._oom_kills = 0
        self._failed = False  # a rank of the attempt has failed
        self._held: dict[str, Any] | None = None  # as told last
        self._decision: OwnDecision | None = None  # without a supervisor
        self._signals: list[int] = []  # stop signals of the attempt
        self._unheard: list[int] = []  # those that found no ranks, or ranks that then failed
        self._ending: Ending | None = None  # the ranks have ended, and what they leave has not
        self.stops = {*stop_signals(), signal.SIGINT}
        for number in self.stops:
            signal.signal(number, self._signalled)

    def serve(self) -> None:
        """Obey until there is nothing more to do.

        Raises:
            fork.Born: in a forked process, which is a rank.
        """
        while self.group or self._ending or not (self.leaving or self.supervisor.closed):
            if self._ending:
                self._end(self._ending)
            elif self.group is None:
                with suppress(ValueError):  # it is closed
                    select.select([self.supervisor], [], [], BEAT)
            elif not self.group.turn(SOON if self._failed else LOOK):
                self._ending, self.group = Ending(self.group.finish()), None
            elif self.supervisor.closed:
                self._decide(self.group)
            elif not self._failed:
                self._look(self.group)
            else:
                self._tell_held(self.group)
            for order in self.supervisor.receive():
                self._silent = 0.0
                self._obey(order)
            self._beat()

    def _obey(self, order: Message) -> None:
        if "beat" in order:
            self.newest = order["beat"]
        elif "start" in order and not self.group:
            self._start(**order)
        elif "signal" in order and self.group:
            self.group.signal(order["signal"])
        elif "end" in order and self.group:
            self.group.end()
        elif "alarm" in order and self.group:
            self._failed = True
            self.slots.alarm()
            self._tell_held(self.group)
        elif "verdict" in order and self.group:
            self._judge(self.group, order["verdict"])
        self.leaving = self.leaving or "leave" in order

    def _start(
        self, start: int, node: int, nodes: int, environ: dict[str, str], kill_wait: float
    ) -> None:
        """Fork the ranks of an attempt."""
        self.attempt, self._oom_kills = start, cgroups.oom_kills()
        os.environ.update(environ)
        topology = Topology(nodes, self.ranks)
        ranks = [topology.rank_of(topology.rank(node, local)) for local in range(self.ranks)]
        gc.collect()
        gc.freeze()  # the ranks share this memory until one writes to it
        signal.pthread_sigmask(signal.SIG_BLOCK, self.stops)
        self.slots.begin()
        self._failed, self._held, self._decision, self._signals = False, None, None, []
        self.group = _fork(ranks, kill_wait)
        if self.group and not self.supervisor.closed:
            self.group.hear(self.supervisor)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.stops)
        if not self.group:
            self._tell_end(exit_codes.FAILED)
            return
        for number in self._unheard:  # just before: srun would have passed them on
            self.group.signal(number)
        self._unheard = []

    def _look(self, group: Group) -> None:
        """See whether a rank has failed, or has lost another one. The others may save first what
        they hold, if they can; a rank that has saved and left is no failure."""
        if not (group.code or CALLS & {*self.slots.phases([*group.processes]).values()}):
            return
        phases = self.slots.phases(group.left).values()
        self._failed, code = True, group.code
        if slots.HUNG in phases and not code:
            code = exit_codes.HUNG
        if code in exit_codes.ALONE or not ABLE & {*phases}:
            group.end()
        else:
            self.slots.alarm()
        self.supervisor.send(failed=self.attempt, code=code)

    def _decide(self, group: Group) -> None:
        """Without a supervisor, as the script's node may be lost: have ranks of this node save the
        newest step, if they have the whole state, alone or together with those of other nodes, and
        no others do it."""
        clock = time.monotonic()
        if not (decision := self._decision):
            run = RunDir(os.environ["HPCDDP_RUN_DIR"])
            decision = self._decision = OwnDecision(run, self.attempt, self.node, clock)
            if self._failed or ABLE & {*self.slots.phases(group.left).values()}:
                self.slots.alarm()  # else all may save together, as after a stop signal
            self._failed = True
        chosen = decision.verdict(self.slots.report(group.left), clock)
        if chosen is not None:
            self._judge(group, chosen)
        if chosen == []:
            group.end()

    def _tell_held(self, group: Group) -> None:
        """Tell the supervisor which steps the ranks hold that wait for its verdict."""
        report = self.slots.report(group.left)
        if report != self._held:
            self._held = report
            self.supervisor.send(held=self.attempt, **report)

    def _judge(self, group: Group, chosen: list[int]) -> None:
        """Let some ranks save, while the others wait; all leave if there are none. Those that are
        deaf to the alarm are killed.

        Args:
            chosen: their global ranks, on all nodes.
        """
        phases = self.slots.phases(group.left)
        group.kill([rank for rank, phase in phases.items() if phase in DEAF])
        for rank in group.processes:
            if rank in chosen or not chosen:
                self.slots.judge(rank % self.ranks, slots.SAVE if chosen else slots.LEAVE)

    def _end(self, ending: Ending) -> None:
        """Tell that the ranks have ended, and all that they have started; also behind their lines,
        which take another way. Else the next ones might lack memory of their GPUs."""
        left = ending.left()
        if left and not ending.late:
            time.sleep(0.05)
            return
        self._ending, code = None, ending.code
        if code and code not in exit_codes.ALONE:
            self._unheard += self._signals
            self._next_beat = 0.0
        if (killed := cgroups.oom_kills() - self._oom_kills) > 0:
            ended = counted(killed, "process", "processes")
            print(f"hpcddp: no memory left on {host()}: oom_kill ended {ended}", flush=True)
        self._tell_end(code, stuck=bool(left))

    def _tell_end(self, code: int, *, stuck: bool = False) -> None:
        self.supervisor.send(ended=self.attempt, code=code, stuck=stuck)
        with suppress(OSError):
            os.write(1, end_of_lines(self.attempt, self.node) + b"\n")

    def _beat(self) -> None:
        """Show that this process lives, and see whether the supervisor does."""
        now = time.monotonic()
        # Only time in which this process ran counts.
        self._silent += min(now - self._clock, 2 * BEAT)
        self._clock = now
        if 0 < self.heartbeat < self._silent - MORE:
            self.supervisor.close()
        if now >= self._next_beat:
            self._next_beat = now + BEAT
            self.supervisor.send(steps=self.slots.total)
            if self._unheard and not (self.group or self._ending):
                self.supervisor.send(stopped=self._unheard[0])
                self._unheard = []

    def _signalled(self, number: int, frame: object) -> None:
        """Slurm signals the ranks too. Without ranks, the supervisor must know of it."""
        if self.group:
            self._signals.append(number)
            self.group.signal(number)
        else:
            self._unheard.append(number)
            self._next_beat = 0.0


def _fork(ranks: list[Rank], kill_wait: float) -> Group | None:
    """Fork some ranks; None if the kernel refuses, by a limit of processes or of memory.

    Raises:
        fork.Born: in a forked process, which is a rank.
    """
    out = io.FileIO(1, "w", closefd=False)
    try:
        group = Group(ranks, fork.start, out, kill_wait=kill_wait, wait=patience(os.environ))
    except OSError as error:
        print(f"hpcddp: cannot start ranks on {host()}: {error}", flush=True)
        return None
    group.holds = True
    return group
