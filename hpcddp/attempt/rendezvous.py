"""Where the ranks of an attempt meet: a free port, at which the first rank of a program listens.

A script that never starts a process group trains as many copies as there are ranks, and each of
them looks well. ``watch`` says so in the log, and ends the ranks where the job has a limit. It runs
on the host of the batch script, which is the first rank's. A launcher that listens there itself
hides whether they have met, and ranks that use Horovod or run functions of a Dask program meet
elsewhere.
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
from hpcddp.rundir import AttemptDir, RunDir, read_json, read_lines

SAY = 300.0  # seconds after which it is said
LIVES = 60.0  # seconds after which ranks that meet elsewhere, or a rank alone, have begun
LOOK = 1.0  # seconds between two looks
TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
LISTENS = "0A"  # Linux, include/net/tcp_states.h


def free_port() -> int:
    """A port that can be bound now. Until then no other process gets it without asking for it."""
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
    """Until the ranks have met or are gone, or their time is over.

    Args:
        number: of the attempt.
        launched: process id of what started the ranks; it passes a signal on to them.
    """
    job = record.read(run)
    alone = job.nodes[1] * job.gpus_per_node == 1
    elsewhere = (
        launch_facts.of(job.launcher, job.launch).get("hides")
        or "hpcddp.dask" in job.spec["command"]
    )
    if environ.get("SLURM_NODEID", "0") != "0":
        return
    if alone or elsewhere:  # nothing shows that they have met, but that they live
        until = time.monotonic() + LIVES
        while alive(launched) and time.monotonic() < until:
            time.sleep(LOOK)
    else:
        port, limit = int(environ["MASTER_PORT"]), float(job.spec.get("start_seconds", 0))
        if not _await_listener(run.attempt(number), launched, port, limit):
            return
    _note(run, number, launched)


def _await_listener(attempt: AttemptDir, launched: int, port: int, limit: float) -> bool:
    """Until the first rank listens at the port, or the ranks are gone; false where their time is
    over, and they are told to end.

    Args:
        limit: seconds that they have; 0 is no limit.
    """
    began, said = time.monotonic(), False
    while alive(launched) and not listening(port):
        if attempt.staging.exists():  # its ranks do not begin to meet
            began = time.monotonic()
        waited = time.monotonic() - began
        if limit and waited >= limit:
            _end(attempt, launched, port, limit)
            return False
        if waited >= SAY and not said:
            said = True
            print(f"hpcddp: no process group after {SAY:g} s: until the script calls torch."
                  f"distributed.init_process_group, each rank trains a copy of its own (nobody "
                  f"listens at MASTER_PORT {port})", flush=True)  # fmt: skip
        time.sleep(LOOK)
    return True


def _end(attempt: AttemptDir, launched: int, port: int, limit: float) -> None:
    """End ranks that have not met in time; the reason is the attempt's error."""
    error = UserError(
        f"no process group after {limit:g} s: nobody listens at MASTER_PORT {port}",
        where="start_seconds",
        hint="the script calls torch.distributed.init_process_group, or one rank is enough",
    )
    print(f"hpcddp: {error_record.report(error, attempt, None)}", flush=True)
    with suppress(ProcessLookupError):
        os.kill(launched, signal.SIGTERM)


def _note(run: RunDir, number: int, launched: int) -> None:
    """Write down that the ranks have met, if they are there."""
    if alive(launched):
        with suppress(OSError):
            run.attempt(number).met.touch()


def met_since(run: RunDir, mine: Attempt, *, program: bool) -> bool:
    """Whether the ranks of an attempt have met since a person last submitted the run. Those of a
    task meet before its code is read: of them, earlier attempts alone count."""
    submitted = (read_json(run.submission) or {}).get("submitted", 0.0)
    numbers = [a.number for a in ledger.attempts(run) if a.began >= submitted]
    return any(met(run.attempt(n)) for n in numbers if program or n < mine.number)


def met(attempt: AttemptDir) -> bool:
    """Whether the ranks of an attempt have met, as far as they or their host saw it."""
    if attempt.met.exists():
        return True
    return any(line.get("event") == "ranks" for line in islice(read_lines(attempt.metrics), 1))


def alive(pid: int) -> bool:
    """Whether a process of ours is there."""
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
