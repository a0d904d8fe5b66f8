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
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hpcddp import processes, record
from hpcddp.attempt import claim, decision, end_facts, ledger, log_reader, requeue
from hpcddp.attempt.decision import End, Policy
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import HpcddpError, SlurmUnreachable, SubmissionRefused
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import rules as site_rules

GLANCE = 0.5  # seconds between two looks at the script and at Slurm's words
SOON = 3.0  # seconds for an answer where Slurm may kill this process before
ANSWER = 60.0  # seconds for an answer where nothing else is in a hurry
LATE = 10.0  # seconds that a script gets to say how it ended, before other nodes ask Slurm
RARELY = 30.0  # most seconds between two questions while it runs
SLOWEST = 5.0  # seconds between two questions of what has become of the job
NAME = "hpcddp-sentry"  # of such a process, as ps shows it
RELIEF = 20.0  # least seconds that a rank spends on a script that is gone
DEAF = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def post(run: RunDir, number: int) -> None:
    """Leave the sentry of an attempt behind, in a fork of this process; returns at once."""
    mine = ledger.read(run.attempt(number))
    if mine is None or not mine.slurm:
        return
    # By its descriptor: the path may be another one for who looks from outside of a container.
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
        bereaved(self.run, self.mine.number)
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
        mine = known(self.run, self.mine)
        if _would_follow(self.run, mine, cause):
            first, self._tried = not self._tried, True
            _submit(self.run, mine, ask=not first)
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
        before = known(self.run, self.mine)
        told = slurm.facts(self.mine.job_id, ANSWER)
        rules = before.site or site_rules.read(
            os.environ.get("SLURM_JOB_PARTITION", ""), ANSWER
        )._asdict()  # fmt: skip
        deadline = told.end if told and told.running else before.deadline
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


def known(run: RunDir, mine: Attempt) -> Attempt:
    """An attempt's facts, with what its sentry has learned since."""
    with contextlib.suppress(HpcddpError):
        told = read_json(run.attempt(mine.number).slurm) or {}
        return replace(mine, **{name: told[name] for name in ("deadline", "site") if name in told})
    return mine


def bereaved(run: RunDir, number: int) -> None:
    """Do for an attempt whose script is gone what the script would have done."""
    pause, deadline = 0.3, time.monotonic() + requeue.HOLD
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, HpcddpError):
            if run.deleted():
                return
            mine = ledger.owner(run, number)
            here = mine is not None and mine.host == os.uname().nodename
            if mine is None or (mine.cause and (mine.action not in decision.RETURNS or not here)):
                return  # elsewhere the script's own sentry ends the wait
            if mine.cause or _settled(run, mine):
                requeue.release(mine)
                return
        time.sleep(pause)
        pause = min(SLOWEST, 1.5 * pause)


def _settled(run: RunDir, mine: Attempt) -> bool:
    """Ask what has become of a job that left no end; whether nothing is left but to end its wait,
    if it waits. A script that was killed is followed.

    Raises:
        SlurmUnreachable: Slurm does not answer.
    """
    told = slurm.facts(mine.job_id)
    if told is None or told.restarts > mine.restarts:
        return True
    if end_facts.was_killed(run, mine, told):
        if _would_follow(run, mine, decision.KILLED):
            # Slurm forgets the proof after some minutes, and the follow-up may wait for longer.
            job_id = _submit(run, mine, ask=True)
            now = replace(mine, ended=time.time(), exit_code=128 + signal.SIGKILL, saved=None)
            now.cause, now.action, now.gained = decision.KILLED, decision.FOLLOW, None
            requeue.note(run, replace(now, successor=job_id))
        return True
    return not (told.running or told.state == "COMPLETING")


def _would_follow(run: RunDir, mine: Attempt, cause: str) -> bool:
    """Whether a job that Slurm ends for this cause is followed, within the run's budgets.

    Raises:
        SlurmUnreachable: whether Slurm has queued it again itself is not known.
    """
    want = str((read_json(run.request) or {}).get("want", ""))
    cancels = mine.site.get("preempt_mode") == "CANCEL"
    if cause == decision.NODE or (cause == decision.PREEMPTED and not cancels):
        try:
            told = slurm.facts(mine.job_id, ANSWER if mine.site else SOON)
        except SlurmUnreachable:
            if mine.site:
                raise
            told = None  # there may be no time to ask again
        if told and told.restarts > mine.restarts:
            return False
    end = End(
        128 + signal.SIGKILL, "COMPLETING", want=want, killed=cause == decision.KILLED,
        ending="" if cause == decision.KILLED else cause, progress=ledger.progress_of(run, mine),
    )  # fmt: skip
    policy = Policy.of(record.read(run).spec.get("requeue", {}))
    owned = ledger.owner(run, mine.number)
    # What the script has written down may be an intention that it could not carry out any more.
    ends = owned is None or bool(owned.successor)
    ends = ends or bool(owned and owned.cause and owned.action not in decision.RETURNS)
    return not ends and decision.decide(end, requeue.past(run), policy).action == decision.FOLLOW


def _submit(run: RunDir, mine: Attempt, *, ask: bool) -> str:
    """Have an attempt followed; the job's id, "" where Slurm does not take it.

    Args:
        ask: whether a follow-up waits already: an answer may have been lost.

    Raises:
        SlurmUnreachable: whether one waits is not known.
    """
    words = [str(mine.number), requeue.LOOK]
    try:
        if ask:
            name = record.read(run).name
            return requeue.follow_up(run, mine, name, words, ok=False, wait=ANSWER)
        return slurm.successor(run.script, words, mine.job_id, ok=False, timeout=ANSWER)
    except SubmissionRefused:
        return ""


def relieve(run: RunDir, number: int) -> None:
    """For a rank that leaves: do what the script would, if that was on this node, and is gone.

    Where cgroups track processes, the sentry went with it.
    """
    if "SLURM_JOB_ID" not in os.environ:
        return
    with contextlib.suppress(OSError, HpcddpError, subprocess.TimeoutExpired):
        mine = ledger.read(run.attempt(number))
        here = mine and mine.slurm and mine.host == os.uname().nodename
        if mine and here and processes.start_of(mine.pid) != mine.pid_start:
            left = float(known(run, mine).site.get("kill_wait", RELIEF))
            subprocess.run(_act(run, number), check=False, timeout=max(RELIEF, left))


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
    words = _act(run, number)
    os.execv(words[0], words)


def _act(run: RunDir, number: int) -> list[str]:
    return [sys.executable, "-I", str(run.host), "bereaved", str(run.path), str(number)]
