"""The sentry: a process beside an attempt's batch script, for work that the script cannot do.

It is not a child of the script, and ignores TERM. It outlives the job unless Slurm tracks processes
by cgroup: then it runs until Slurm's KILL. It

    - copies Slurm's messages about the job from a file of the node into the run's log,
    - asks Slurm now and then for the end of the time limit, which may change, and for facts that
      the attempt's start could not get: RUN/attempts/N/slurm.json,
    - signals the ranks of a restart in place if Slurm announced a preemption before they ran,
    - submits a follow-up as soon as Slurm says that it ends the job, and why: saving may take
      longer than the script lives. The follow-up decides again when it starts,
    - ends the wait of a requeued job when the script has ended,
    - and submits a follow-up if a SIGKILL that was not Slurm's ended the script.

Once the script has started the next attempt in the same allocation, which has its own, it leaves.

A process on the second node does the last two if the script's whole node is lost, and one on the
third if the second is lost too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hpcddp import processes, record
from hpcddp.attempt import (
    claim,
    decision,
    launch_facts,
    ledger,
    log_reader,
    lost_script,
    requeue,
)
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.lost_script import ANSWER
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import rules as site_rules

GLANCE = 0.5  # seconds between two looks at the script and at Slurm's messages
LATE = 10.0  # seconds for a script to record its end, before the next node asks Slurm
WATCHERS = ("1", "2")  # the nodes of a step on which a process waits for the loss of the script's
RARELY = 30.0  # most seconds between two requests while it runs
EARLY = 10.0  # seconds after a restart in place in which its ranks may have missed a signal
SOON = 2.0  # seconds between two requests in that time
NAME = "hpcddp-sentry"  # of the process, in ps
DEAF = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def post(run: RunDir, number: int) -> None:
    """Start the sentry of an attempt, as a fork of this process; returns at once."""
    mine = ledger.read(run.attempt(number))
    if mine is None or not mine.slurm:
        return
    # By its descriptor: outside of a container the path may differ.
    log = os.open("/proc/self/fd/2", os.O_RDONLY) if mine.node_log else -1
    if not _detached():
        return
    try:
        Sentry(run, mine, log).stand()
    finally:
        os._exit(0)


def _detached() -> bool:
    """Fork a process in a session of its own, which ignores stop signals; true in that process."""
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in DEAF:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for old in range(3):  # readers of a pipe would wait for this process
        os.dup2(null, old)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
        os.nice(19)
    return True


class Sentry:
    """The sentry of one attempt, on the host of its script.

    Args:
        log: descriptor of Slurm's log, if that is a file of the node.
    """

    def __init__(self, run: RunDir, mine: Attempt, log: int) -> None:
        self.run, self.mine, self._log = run, mine, log
        self.job = record.read(run)
        self._copied, self._environ = mine.node_log_size, processes.environ_of(mine.pid)
        self._followed = self._tried = False

    def stand(self) -> None:
        """Watch the script until it has ended, and do what follows."""
        threading.Thread(target=self._ask, daemon=True).start()
        while processes.start_of(self.mine.pid) == self.mine.pid_start:
            if self._superseded():
                return
            self._glance()
            time.sleep(GLANCE)
        until = time.monotonic() + requeue.HOLD
        while self._glance() and not self._followed and time.monotonic() < until:
            time.sleep(requeue.PAUSE)
        lost_script.bring_back(self.run, self.mine.number)
        while self._glance() and time.monotonic() < until:
            time.sleep(requeue.PAUSE)
        self._clear()

    def _superseded(self) -> bool:
        """Whether the script has begun another attempt. Then it has replaced itself before, and its
        environment is another one: the disk need not be asked each time."""
        if processes.environ_of(self.mine.pid) in (self._environ, b""):
            return False
        with contextlib.suppress(OSError, HpcddpError):
            return ledger.owner(self.run, self.mine.number) is None
        return False

    def _glance(self) -> bool:
        """Look at Slurm's messages, and do what follows; whether some of it is left."""
        spoken, joined = True, False
        with contextlib.suppress(OSError, HpcddpError):  # the disk may answer later
            spoken, joined = self._join(), True
        with contextlib.suppress(OSError, HpcddpError):
            if spoken and not self._followed:
                cause = log_reader.ending_of(self.mine)
                if cause not in decision.FOLLOWED:
                    return False
                self._follow(cause)
        return not joined or (spoken and not self._followed)

    def _join(self) -> bool:
        """Copy Slurm's new messages into the run's log; whether there are any about this
        attempt."""
        mine = self.mine
        if not mine.node_log:  # a log of the user's own
            return bool(mine.said) and Path(mine.said).stat().st_size > mine.said_size
        while text := os.pread(self._log, 1 << 16, self._copied):
            with open(mine.said, "ab") as log:
                log.write(text)
            self._copied += len(text)
        return self._copied > mine.node_log_size

    def _clear(self) -> None:
        """Remove the node's log, if all of it was copied."""
        with contextlib.suppress(OSError):
            if self.mine.node_log and os.fstat(self._log).st_size == self._copied:
                claim.clear(self.mine)

    def _follow(self, cause: str) -> None:
        """Submit a follow-up, if Slurm ends the job for a cause that is followed. There may be
        seconds left: the first time, no other request comes before."""
        mine = ledger.refreshed(self.run, self.mine)
        if lost_script.would_follow(self.run, mine, cause):
            first, self._tried = not self._tried, True
            lost_script.submit(self.run, mine, ask=not first)
        self._followed = True

    def _ask(self) -> None:
        """Ask Slurm regularly, at least as often as the cluster profile says."""
        dropped, pause = False, min(max(1.0, float(self.job.poll_seconds)), RARELY)
        if self.mine.site and self.mine.number == 1:
            time.sleep(pause)
        until = time.monotonic() + EARLY if self._missed_signals() else 0.0
        while True:
            early = time.monotonic() < until
            with contextlib.suppress(OSError, HpcddpError):
                dropped = dropped or self._drop_follow_ups()
                job = self._learn()
                if early and job and job.running and job.preempted:
                    slurm.cancel(self.mine.job_id, signal="TERM", timeout=ANSWER)  # as Slurm did
            time.sleep(SOON if early else pause)

    def _missed_signals(self) -> bool:
        """Whether this attempt is a restart in place without parents: a signal of Slurm before its
        ranks ran has reached no process."""
        row = launch_facts.of(self.job.launcher, self.job.launch)
        if self.mine.number == 1 or row.get("spares"):
            return False
        with contextlib.suppress(OSError, HpcddpError):
            before = ledger.read(self.run.attempt(self.mine.number - 1))
            return before is not None and before.action == decision.HERE
        return True

    def _learn(self) -> slurm.JobInfo | None:
        """Record the end of the time limit and the site's rules, if they are new.

        Returns: Slurm's facts about the job.
        """
        before = ledger.refreshed(self.run, self.mine)
        job = slurm.facts(self.mine.job_id, ANSWER)
        rules = before.site or site_rules.read(
            os.environ.get("SLURM_JOB_PARTITION", ""), ANSWER
        )._asdict()  # fmt: skip
        deadline = job.end if job and job.running else before.deadline
        if (deadline, rules) != (before.deadline, before.site):
            facts = {"deadline": deadline, "site": rules}
            write_json(self.run.attempt(self.mine.number).slurm, facts)
        return job

    def _drop_follow_ups(self) -> bool:
        """Cancel the jobs that were to follow an earlier attempt; true once it is done.

        Raises:
            SlurmUnreachable: there may be some.
        """
        mine = self.mine
        if mine.number > 1:
            name, upto = self.job.name, mine.number - 1
            requeue.drop(self.run, name, upto=upto, but=mine.job_id, wait=ANSWER)
        return True


def watch_node(run_dir: str, environ: Mapping[str, str]) -> None:
    """In the first rank of the second and the third node, or in their parent, start a process that
    acts if this one has ended but the script records no end: its node may be lost. Returns at once.

    A parent calls it before it adopts orphans: Slurm ends all that it has adopted.
    """
    local = environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID"))
    node = environ.get("SLURM_NODEID", "")
    if node not in WATCHERS or local != "0" or "HPCDDP_ATTEMPT" not in environ:
        return
    rank, start = os.getpid(), processes.start_of(os.getpid())
    if not _detached():
        return
    try:
        late = LATE * int(node)
        _outlive(RunDir(run_dir), int(environ["HPCDDP_ATTEMPT"]), rank, start, late)
    finally:
        os._exit(0)


def _outlive(run: RunDir, number: int, rank: int, start: str, late: float) -> None:
    """Wait for a rank's end, and then for the script's record; without one, act.

    Args:
        late: seconds for that record.
    """
    while processes.start_of(rank) == start:
        time.sleep(1.0)
    until = time.monotonic() + late
    with contextlib.suppress(OSError):  # there may have been restarts in place
        number = max([number, *(folder.number for folder in run.all_attempts())])
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, TypeError):
            facts = json.loads(run.attempt(number).facts.read_text())
            ended = facts.get("cause") and facts.get("action") != decision.HERE
            if ended or run.outlived(number):
                return
        time.sleep(1.0)
    words = lost_script.command(run, number)
    os.execve(words[0], words, lost_script.environment())
