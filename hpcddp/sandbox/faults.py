"""Rehearsal: the faults, one function each. It returns when the run can continue by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

from hpcddp.errors import HpcddpError
from hpcddp.planning.jobfile import Layer
from hpcddp.record import read as read_record
from hpcddp.sandbox import daemons, own_processes, time_limits
from hpcddp.sandbox.fault_times import EARLY, Fault
from hpcddp.sandbox.rehearsed_run import LOOK, RehearsedRun
from hpcddp.sandbox.state import load
from hpcddp.slurm import commands as slurm
from hpcddp.submit import prepare, submission
from hpcddp.submit.run_jobs import current, rows_of
from hpcddp.submit.status import status

PAUSE = 0.5  # seconds between two questions to Slurm
NOTICE = 40.0  # seconds within which Slurm preempts, or ends a job at its limit


def preempt(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """A job of higher priority needs the nodes."""
    job, hosts = run.facts().job_id, ",".join(run.hosts())
    options = ("--partition=high", "--exclusive", f"--nodelist={hosts}", "--output=/dev/null")
    with run.held():
        slurm.call("sbatch", "--chdir=/", *options, "--wrap=sleep 1")
        run.until(lambda: _notified(run, job, fault), "the preemption by Slurm", NOTICE)


def _notified(run: RehearsedRun, job: str, fault: Fault) -> bool:
    """Whether Slurm has sent the notice of a preemption: then the run may continue."""
    facts = slurm.facts(job)
    return run.gone(fault.attempt) or not facts or facts.preempted or not facts.running


def kill_node(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """A node fails with all of its processes, and returns after the run's next start."""
    _kill_node(run, fault, _node(run, fault))


def kill_head(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """The node of the batch script fails, and returns after the run's next start."""
    _kill_node(run, fault, run.facts().host)


def silent_node(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """A node has no network, or no power, for some time: all its processes are paused."""
    fault.node = node = _node(run, fault)
    home = str(run.sandbox.logs.parent)
    paused = [run.sandbox.daemon(f"slurmd-{node}"), *own_processes.of_jobs(home, node)]
    own_processes.send(paused, signal.SIGSTOP)
    try:
        _outlast(run, fault)
    finally:
        own_processes.send(paused, signal.SIGCONT)
    run.until(lambda: _back(run, node), f"{node} to return")


def kill_script(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """The batch script is killed, and not by Slurm."""
    own_processes.send(own_processes.of_pids([run.facts().pid]), signal.SIGKILL)


def _node(run: RehearsedRun, fault: Fault) -> str:
    """A node of the run; with spares, one that a spare can replace."""
    hosts, facts = run.hosts(), run.facts()
    if read_record(run.folder).spec.get("spares"):
        hosts = [host for host in hosts if host != facts.host] or hosts
    return fault.pick(hosts)


def _kill_node(run: RehearsedRun, fault: Fault, node: str) -> None:
    fault.node, home = node, str(run.sandbox.logs.parent)
    run.stopped = f"slurmd-{node}"
    run.sandbox.stop_daemon(run.stopped, signal.SIGKILL)
    while left := own_processes.of_jobs(home, node):
        own_processes.end(left, signal.SIGKILL, 1.0)
    _outlast(run, fault)
    run.sandbox.start_daemon(run.stopped)
    run.stopped = ""
    run.until(lambda: _back(run, node), f"{node} to return")


def _outlast(run: RehearsedRun, fault: Fault) -> None:
    """Wait until the run continues without a node, and perhaps until Slurm does too."""
    run.until_after(fault.attempt, without=fault.node)
    if fault.down:
        run.until(lambda: _down(run, fault.node), f"Slurm to have {fault.node} down", ends=True)


def _down(run: RehearsedRun, node: str) -> bool:
    time.sleep(PAUSE)
    return "down" in _state(run, node)


def _back(run: RehearsedRun, node: str) -> bool:
    return _state(run, node) in ("idle", "mixed", "allocated")


def _state(run: RehearsedRun, node: str) -> str:
    """A node's state at Slurm."""
    state = load(run.sandbox.folder)
    return daemons.node_states(state)[node] if state else ""


def timeout(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """The time limit ends; the attempt has had it from its start."""
    with run.held():
        deadline = run.until(lambda: time_limits.deadline(run.facts()), "a time limit", NOTICE)
        # A program that does not know its limit stays paused until Slurm ends it, some time later.
        near = float("inf") if run.clock else deadline - EARLY
        run.until(lambda: time.time() > near or run.gone(fault.attempt), "the time limit")
    run.until(lambda: run.gone(fault.attempt), "the end by the time limit", NOTICE + EARLY)
    run.until(lambda: _unlimited(run, fault), "the old time limit of the job")


def _unlimited(run: RehearsedRun, fault: Fault) -> bool:
    """Restore the job's old limit before its next attempt; a follow-up job has it anyway."""
    job = str(current(run.folder))
    facts = slurm.facts(job)
    if run.number > fault.attempt:
        return True
    if facts is None or facts.state != "PENDING":
        return False
    done = slurm.call("scontrol", "update", f"JobId={job}", f"TimeLimit={time_limits.USUAL}")
    return done.returncode == 0


def crash(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """A rank is killed."""
    own_processes.send([_rank(run, fault)], signal.SIGKILL)


def hang(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """A rank is paused."""
    rank = _rank(run, fault)
    own_processes.send([rank], signal.SIGSTOP)
    try:
        run.until(lambda: run.gone(fault.attempt), "the hang to be noticed")
    finally:
        own_processes.end([rank], signal.SIGKILL, 10.0)


def _rank(run: RehearsedRun, fault: Fault) -> own_processes.OwnProcess:
    """The rank that a fault hits, as soon as the ranks are known."""
    return fault.pick(run.until(run.ranks, "the ranks to report"))


def cancel(run: RehearsedRun, fault: Fault, watch: float) -> None:
    """A person cancels the job; it must stay ended until a person resumes it."""
    slurm.cancel(str(current(run.folder)))
    run.until(lambda: status(run.folder).final and not _jobs(run), "the job to end", ends=True)
    if (end := status(run.folder)).state == "COMPLETED":
        return
    deadline = time.monotonic() + watch
    while time.monotonic() < deadline:
        if _jobs(run) or run.number > fault.attempt or end.state != "CANCELLED":
            fault.failed = f"its state after the cancel is {status(run.folder).state}"
            return
        time.sleep(0.5)
    plan = prepare.again(run.folder, Layer(), os.environ)
    submission.submit(plan, run.folder)


def _jobs(run: RehearsedRun) -> list[str]:
    """The ids of the run's jobs that have not ended."""
    jobs = rows_of(run.folder, slurm.queue(name=read_record(run.folder).name))
    return [job.job_id for job in jobs if job.live]


@contextlib.contextmanager
def second(run: RehearsedRun, fault: Fault) -> Iterator[None]:
    """Within, kill one more rank while the fault is handled, if it is to have a second one: of its
    attempt, or of the next one."""
    if fault.second is None:
        yield
        return
    over, delay = threading.Event(), fault.second

    def kill() -> None:
        over.wait(delay)
        while not over.wait(LOOK):
            with contextlib.suppress(HpcddpError, OSError):
                ranks = [rank for rank in run.ranks() if rank.alive()]
                if ranks:
                    fault.second_attempt = run.number
                    own_processes.send([fault.pick(ranks)], signal.SIGKILL)
                    return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
        killer.join(NOTICE)
    finally:
        over.set()
        killer.join()


PLAY = {
    "preempt": preempt,
    "kill-node": kill_node,
    "timeout": timeout,
    "crash": crash,
    "hang": hang,
    "cancel": cancel,
    "silent-node": silent_node,
    "kill-script": kill_script,
    "kill-head": kill_head,
}
