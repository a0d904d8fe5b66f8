"""The sentry: a process beside an attempt's batch script, for what a script cannot do itself.

It is no child of the script, and deaf to TERM. Where Slurm lets it, it outlives the job; where
cgroups track processes it lives until Slurm's KILL. It

    - copies Slurm's words on the job from a file of the node into the run's log,
    - asks Slurm now and then for the end of the time limit, which may change, and for what the
      attempt's begin could not learn: RUN/attempts/N/slurm.json,
    - submits a follow-up as soon as Slurm says that it ends the job, and why: the ranks may need
      longer to save than the script may live. The follow-up decides at its own begin again,
    - ends the wait of a job that Slurm has queued again, when the script is gone,
    - and where a SIGKILL that was not Slurm's has ended the script, has the run followed.

A rank on the second node looks after the last two where the script's whole node is lost.
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
from hpcddp.attempt import claim, decision, ledger, log_reader, lost_script, requeue
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.lost_script import ANSWER
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import rules as site_rules

GLANCE = 0.5  # seconds between two looks at the script and at Slurm's words
LATE = 10.0  # seconds that a script gets to say how it ended, before other nodes ask Slurm
RARELY = 30.0  # most seconds between two questions while it runs
NAME = "hpcddp-sentry"  # of such a process, as ps shows it
DEAF = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def post(run: RunDir, number: int) -> None:
    """Leave the sentry of an attempt behind, in a fork of this process; returns at once."""
    mine = ledger.read(run.attempt(number))
    if mine is None or not mine.slurm:
        return
    # By its descriptor: outside of a container the path may be another one.
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
    for old in range(3):  # a reader of a pipe would wait until this process closes it
        os.dup2(null, old)
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(NAME)
        os.nice(19)
    return True


class Sentry:
    """The sentry of one attempt, on the host of its script.

    Args:
        log: descriptor of the file into which Slurm writes, where that is one of the node.
    """

    def __init__(self, run: RunDir, mine: Attempt, log: int) -> None:
        self.run, self.mine, self._log = run, mine, log
        self.job = record.read(run)
        self._copied = mine.node_log_size
        self._followed = self._tried = False

    def stand(self) -> None:
        """Until the script is gone, and what follows from that is done."""
        threading.Thread(target=self._ask, daemon=True).start()
        while processes.start_of(self.mine.pid) == self.mine.pid_start:
            self._glance()
            time.sleep(GLANCE)
        until = time.monotonic() + requeue.HOLD
        while self._glance() and not self._followed and time.monotonic() < until:
            time.sleep(requeue.PAUSE)
        lost_script.bring_back(self.run, self.mine.number)
        while self._glance() and time.monotonic() < until:
            time.sleep(requeue.PAUSE)
        self._clear()

    def _glance(self) -> bool:
        """Look at Slurm's words, and do what follows; whether that is not done yet."""
        spoken, joined = True, False
        with contextlib.suppress(OSError, HpcddpError):  # a disk that is away may come back
            spoken, joined = self._join(), True
        with contextlib.suppress(OSError, HpcddpError):
            if spoken and not self._followed:
                cause = log_reader.ending_of(self.mine)
                if cause not in decision.FOLLOWED:
                    return False
                self._follow(cause)
        return not joined or (spoken and not self._followed)

    def _join(self) -> bool:
        """Copy what Slurm has said since the last look into the run's own log; whether it has said
        anything in this life."""
        mine = self.mine
        if not mine.node_log:  # a person's own log, in the run dir
            return bool(mine.said) and Path(mine.said).stat().st_size > mine.said_size
        while text := os.pread(self._log, 1 << 16, self._copied):
            with open(mine.said, "ab") as log:
                log.write(text)
            self._copied += len(text)
        return self._copied > mine.node_log_size

    def _clear(self) -> None:
        """Leave nothing on the node, if all of it was copied."""
        with contextlib.suppress(OSError):
            if self.mine.node_log and os.fstat(self._log).st_size == self._copied:
                claim.clear(self.mine)

    def _follow(self, cause: str) -> None:
        """Submit a follow-up, if Slurm ends the job for what is followed. The script may have
        seconds left, and this process with it: the first time nothing is asked before."""
        mine = ledger.refreshed(self.run, self.mine)
        if lost_script.would_follow(self.run, mine, cause):
            first, self._tried = not self._tried, True
            lost_script.submit(self.run, mine, ask=not first)
        self._followed = True

    def _ask(self) -> None:
        """Ask Slurm, at the pace of the cluster's profile or a faster one; what begin could not
        learn at once."""
        dropped, pause = False, min(max(1.0, float(self.job.poll_seconds)), RARELY)
        if self.mine.site and self.mine.number == 1:
            time.sleep(pause)
        while True:
            with contextlib.suppress(OSError, HpcddpError):
                dropped = dropped or self._drop_follow_ups()
                self._learn()
            time.sleep(pause)

    def _learn(self) -> None:
        """Write down the end of the time limit and the site's rules, where Slurm says something
        new."""
        before = ledger.refreshed(self.run, self.mine)
        job = slurm.facts(self.mine.job_id, ANSWER)
        rules = before.site or site_rules.read(
            os.environ.get("SLURM_JOB_PARTITION", ""), ANSWER
        )._asdict()  # fmt: skip
        deadline = job.end if job and job.running else before.deadline
        if (deadline, rules) != (before.deadline, before.site):
            facts = {"deadline": deadline, "site": rules}
            write_json(self.run.attempt(self.mine.number).slurm, facts)

    def _drop_follow_ups(self) -> bool:
        """Cancel the jobs that were to follow an earlier attempt; true once it is done.

        Raises:
            SlurmUnreachable: it is not known whether there are any.
        """
        mine = self.mine
        if mine.number > 1:
            name, upto = self.job.name, mine.number - 1
            requeue.drop(self.run, name, upto=upto, but=mine.job_id, wait=ANSWER)
        return True


def watch_node(run_dir: str, environ: Mapping[str, str]) -> None:
    """Let the first rank of the second node leave a process behind that acts when the rank is gone
    and the script does not say how the attempt ended: its node may be lost. Returns at once."""
    local = environ.get("LOCAL_RANK", environ.get("SLURM_LOCALID"))
    if (environ.get("SLURM_NODEID"), local) != ("1", "0") or "HPCDDP_ATTEMPT" not in environ:
        return
    rank, start = os.getpid(), processes.start_of(os.getpid())
    if not _detached():
        return
    try:
        _outlive(RunDir(run_dir), int(environ["HPCDDP_ATTEMPT"]), rank, start)
    finally:
        os._exit(0)


def _outlive(run: RunDir, number: int, rank: int, start: str) -> None:
    """Wait for the end of a rank, and then for its script's word; without one, act."""
    while processes.start_of(rank) == start:
        time.sleep(1.0)
    until = time.monotonic() + LATE
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, TypeError):
            facts = json.loads(run.attempt(number).facts.read_text())
            if facts.get("cause") or run.outlived(number):
                return
        time.sleep(1.0)
    words = lost_script.command(run, number)
    os.execv(words[0], words)
