"""The rendezvous of an attempt's ranks: a free port, at which the first rank of a program listens.

A script that never starts a process group trains a copy in each rank, without any error. ``watch``
warns in the log, and ends the ranks if the job has a limit, or if each of them waits in a launcher
of its own. It runs on the batch script's host, which is the first rank's. The rendezvous cannot be
seen if a launcher listens at the port itself, or if ranks use Horovod or run functions of a Dask
program.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from hpcddp import record
from hpcddp.attempt import error_record, launch_facts, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import RunError, UserError
from hpcddp.record import JobRecord
from hpcddp.rundir import AttemptDir, RunDir, read_json, read_lines

SAY = 300.0  # seconds until the warning
LIVES = 60.0  # seconds after which ranks with an unseen rendezvous count as started
LOOK = 1.0  # seconds between two looks
LOOK_ALL = 5.0  # seconds between two looks at all processes of this host
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
# Launchers that are no Python: hpcddp.gloo cannot notice them.
NESTED = ("mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun", "srun")
WORLDS = ("SLURM_STEP_ID", "PMIX_NAMESPACE", "PMI_SIZE")  # the keys of hpcddp.gloo.WORLDS
LISTENS = "0A"  # Linux, include/net/tcp_states.h


def free_port() -> int:
    """A free port, outside of the range that the kernel gives to processes."""
    low, high = 32768, 60999
    try:
        text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
        low, high = (int(n) for n in text.split())
    except (OSError, ValueError):
        pass
    ports = [p for p in range(15000, 65000) if not low <= p <= high]
    for port in random.SystemRandom().sample(ports, min(200, len(ports))):
        with socket.socket() as s:
            try:
                s.bind(("", port))
            except OSError:
                continue
            return port
    raise RunError("no free port for the rendezvous", where=os.uname().nodename)


def watch(run: RunDir, number: int, launched: int, environ: Mapping[str, str]) -> None:
    """Watch until the ranks have reached the rendezvous or ended, or their time is over.

    Args:
        number: of the attempt.
        launched: process id of the launcher, which passes signals on to the ranks.
    """
    job = record.read(run)
    if environ.get("SLURM_NODEID", "0") != "0":
        return
    if hidden(job):
        _await_time(launched)
    else:
        port, limit = int(environ["MASTER_PORT"]), float(job.spec.get("start_seconds", 0))
        here = job.gpus_per_node * (1 if job.backend == "slurm" else job.nodes[1])
        if not _await_listener(run.attempt(number), launched, port, limit, here):
            return
    _note(run, number, launched)


def _await_time(launched: int) -> None:
    """Wait until ranks whose rendezvous cannot be seen have lived for some time."""
    until = time.monotonic() + LIVES
    while alive(launched) and time.monotonic() < until:
        time.sleep(LOOK)


def hidden(job: JobRecord) -> bool:
    """Whether a command has no rendezvous to be seen: `met` then says little of its start."""
    alone = job.nodes[1] * job.gpus_per_node == 1
    elsewhere = launch_facts.of(job.launcher, job.launch).get("hides")
    return bool(alone or elsewhere or "hpcddp.dask" in job.spec["command"])


def _await_listener(attempt: AttemptDir, launched: int, port: int, limit: float, here: int) -> bool:
    """Wait until the first rank listens at the port, or the ranks have ended; false if their time
    is over, and they are ended.

    Args:
        limit: seconds that they have; 0: no limit.
        here: number of ranks on this host.
    """
    began, said = time.monotonic(), False
    inner = InnerLauncher(attempt.path.parents[1], here)
    while alive(launched) and not listening(port):
        hosts = (read_json(attempt.hosts) or {}).get("in_order") or [error_record.host()]
        if hosts[0] != error_record.host():  # the ranks meet on another node
            _await_time(launched)
            return True
        if attempt.staging.exists():  # before the ranks start
            began = time.monotonic()
        waited = time.monotonic() - began
        if limit and waited >= limit:
            _end(attempt, launched, _not_met(port, limit))
            return False
        if name := inner.stuck():
            _end(attempt, launched, _waits(name))
            return False
        if waited >= SAY and not said:
            said = True
            print(f"hpcddp: no process group after {SAY:g} s (nothing listens at MASTER_PORT "
                  f"{port}): until the script calls torch.distributed.init_process_group, each "
                  f"rank trains its own copy", flush=True)  # fmt: skip
        time.sleep(LOOK)
    return True


class InnerLauncher:
    """Notices ranks that wait in a launcher of their own, which has started nothing yet.

    srun waits, without end, for CPUs that the rank itself has; Open MPI's mpirun calls srun.

    Args:
        run: the run's folder.
        here: number of ranks on this host.
    """

    def __init__(self, run: Path, here: int) -> None:
        self.run, self.here = run, here
        self.next_look = self.since = 0.0
        self.seen: dict[str, str] = {}

    def stuck(self) -> str:
        """The launcher that has waited in each rank on this host for LIVES seconds; "" for none."""
        now = time.monotonic()
        if now >= self.next_look:
            self.next_look = now + LOOK_ALL
            waiting = self._waiting()
            if waiting != self.seen:
                self.seen, self.since = waiting, now
        if not self.seen or now - self.since < LIVES:
            return ""
        return next(name for name in NESTED if name in self.seen.values())

    def _waiting(self) -> dict[str, str]:
        """Process id -> name of the launchers in the ranks; none if one has started a process, or
        if a rank has none (proc(5), /proc/pid)."""
        ranks, waiting = set(), {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (path / "environ").read_text(errors="replace").split("\0")
                environ = dict(word.partition("=")[::2] for word in words)
                if environ.get("HPCDDP_RUN_DIR") != str(self.run) or "HPCDDP_WORLD" not in environ:
                    continue
                rank, _, *outer = environ["HPCDDP_WORLD"].split(";")
                if [*map(environ.get, WORLDS, outer)] != outer:
                    return {}
                if (name := (path / "comm").read_text().strip()) in NESTED:
                    ranks.add(rank)
                    waiting[path.name] = name
        return waiting if len(ranks) >= self.here else {}


def _waits(name: str) -> UserError:
    return UserError(
        f"{name} runs in each rank, and has started nothing for {LIVES:g} s",
        where="command",
        hint=f"each rank runs the command itself; leave {name} out",
    )


def _not_met(port: int, limit: float) -> UserError:
    return UserError(
        f"no process group after {limit:g} s: nothing listens at MASTER_PORT {port}",
        where="start_seconds",
        hint="call torch.distributed.init_process_group in the script, or use one rank",
    )


def _end(attempt: AttemptDir, launched: int, error: UserError) -> None:
    """End the ranks, and record the reason as the attempt's error."""
    print(f"hpcddp: {error_record.report(error, attempt, None)}", flush=True)
    with suppress(ProcessLookupError):
        os.kill(launched, signal.SIGTERM)


def _note(run: RunDir, number: int, launched: int) -> None:
    """Record that the ranks have reached the rendezvous, if they still run."""
    if alive(launched):
        with suppress(OSError):
            run.attempt(number).met.touch()


def met_since(run: RunDir, mine: Attempt, *, program: bool) -> bool:
    """Whether ranks have reached the rendezvous since the run was last submitted. Those of a task
    do so before its code is imported: for a task only earlier attempts count."""
    submitted = (read_json(run.submission) or {}).get("submitted", 0.0)
    numbers = [a.number for a in ledger.attempts(run) if a.began >= submitted]
    return any(met(run.attempt(n)) for n in numbers if program or n < mine.number)


def met(attempt: AttemptDir) -> bool:
    """Whether the ranks of an attempt have reached the rendezvous, as far as it was recorded."""
    if attempt.met.exists():
        return True
    return any(line.get("event") == "ranks" for line in islice(read_lines(attempt.metrics), 1))


def alive(pid: int) -> bool:
    """Whether a process of ours exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def listening(port: int) -> bool:
    """Whether a process on this host listens at a TCP port (proc(5), /proc/net/tcp)."""
    for table in TABLES:
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == LISTENS and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False
