"""An attempt's ranks, run by the parents of its nodes: the attempt's part.

It asks the supervisor of the batch script (supervisor.py) to run them, and waits for their end. The
first attempt in an allocation starts the supervisor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from hpcddp import processes, record
from hpcddp.attempt import error_record, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.link import channel, own_decision, slots
from hpcddp.attempt.link.channel import Channel, Message
from hpcddp.attempt.link.newest_step import SAVE
from hpcddp.attempt.link.own_decision import SHOWN
from hpcddp.attempt.link.parents import ADDRESS, HEARTBEAT, PARENT, SECRET
from hpcddp.attempt.link.supervisor import Supervisor
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.errors import HpcddpError
from hpcddp.preempt import ignore_stop_signals
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, write_json
from hpcddp.slurm.hostlist_writer import compress_hosts

SILENT = 10.0  # seconds of silence after which a node is lost, where the job says nothing
KILL_WAIT = 30.0  # seconds between TERM and KILL: Slurm's default
START_TIMEOUT = 600.0  # seconds for the parents to come
WAIT = 600.0  # seconds between the end of the first node's ranks and the last's, for a task
# The parents end ranks that have lost another one, once the newest step is saved, and a watchdog
# those that hang. With 0, NCCL aborts none before (PyTorch, "ProcessGroupNCCL Environment
# Variables").
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
READS = 60  # tries to read a file of the run, a second apart
OWN = {ADDRESS, SECRET, HEARTBEAT, slots.NAME}  # variables of a parent

T = TypeVar("T")


def run(run: RunDir, number: int, script: int, nodes: int, srun: Sequence[str]) -> int:
    """Run the ranks of an attempt; their exit code. TERM and INT end them, USR2 is passed on.

    Args:
        script: process id of the batch script.
        nodes: of the allocation.
        srun: the command that starts the parents, one on each node.
    """
    came: list[int] = []
    awake, wake = socket.socketpair()
    for end in (awake, wake):
        end.setblocking(False)
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(stop, lambda number, frame: came.append(number))
    signal.set_wakeup_fd(wake.fileno())  # else ``select`` would go on
    job = patiently(lambda: record.read(run))
    supervisor = find(job, script, nodes, srun)
    supervisor.send(start=number, **_order(run, number, job, nodes))
    while not supervisor.closed:
        if awake.fileno() in select.select([supervisor.fileno(), awake.fileno()], [], [])[0]:
            awake.recv(1 << 12)
        while came:
            sent = came.pop(0)
            supervisor.send(**({"signal": sent} if sent == signal.SIGUSR2 else {"end": True}))
        for message in supervisor.receive():
            if len(message.get("hosts", ())) not in (0, nodes):
                _record_nodes(run, number, message["hosts"])
            if "ended" in message:
                _record_loss(run, number, message)
                ignore_stop_signals()  # a signal during Python's exit would change the exit code
                return int(message["ended"])
    print("hpcddp: the supervisor of the ranks has ended", flush=True)
    _await_parents(run, number)
    _record_loss(run, number, {"ended": 1, "failed": time.time(), "usable": [], "lost": {}})
    return 1


def _await_parents(run: RunDir, attempt: int) -> None:
    """Wait until this node's parent has ended, which may save first, and until those of other nodes
    have saved what they claim. They are not known without a supervisor, so that this allocation is
    not used again."""
    until, mine = time.monotonic() + SAVE + 2 * SHOWN, f"HPCDDP_RUN_DIR={run.path}".encode()
    while time.monotonic() < until and (
        any(mine in processes.environ_of(pid).split(b"\0") for pid in processes.named(PARENT))
        or own_decision.unsaved(run, attempt)
    ):
        time.sleep(0.5)


def patiently(read: Callable[[], T]) -> T:
    """What a function reads from the run folder; a disk may not answer for a minute.

    Raises:
        HpcddpError, OSError: it still does not.
    """
    for _ in range(READS):
        try:
            return read()
        except (HpcddpError, OSError):
            time.sleep(1.0)
    return read()


def _order(run: RunDir, number: int, job: JobRecord, nodes: int) -> Message:
    """What the supervisor must know of an attempt."""
    mine = ledger.read(run.attempt(number))
    site = mine.site if mine else {}
    environ = {name: text for name, text in os.environ.items()
               if name.startswith(("HPCDDP_", "MASTER_")) and name not in OWN}  # fmt: skip
    watched = not job.spec.get("command") and job.spec.get("train", {}).get("hang_seconds", 0) > 0
    if watched and not os.environ.keys() & {NCCL_ERRORS, NCCL_ERRORS.removeprefix("TORCH_")}:
        environ[NCCL_ERRORS] = "0"
    return {
        "least": job.nodes[0],
        "most": min(nodes - int(job.spec.get("spares", 0)), job.nodes[1]),
        "kill_wait": float(site.get("kill_wait", KILL_WAIT)),
        "patience": float(os.environ.get("HPCDDP_START_TIMEOUT", START_TIMEOUT)),
        "wait": 0.0 if job.spec.get("command") else WAIT,
        "suffix": job.host_suffix,
        "environ": environ,
        "without": _barred(run, job, mine) if mine else [],
    }


def _barred(run: RunDir, job: JobRecord, mine: Attempt) -> list[str]:
    """The nodes that are not to be used again; none if a record of the run cannot be read."""
    try:
        return bad_nodes.barred(run, job, mine)
    except (HpcddpError, OSError, LookupError, TypeError, ValueError) as error:
        print(f"hpcddp: all nodes are used: {error}", flush=True)
        return []


def _record_nodes(run: RunDir, number: int, hosts: Sequence[str]) -> None:
    """Record the nodes of an attempt, in the order of its ranks, if they are not all of the job."""
    try:
        write_json(run.attempt(number).hosts, {"in_order": list(hosts)})
    except OSError as error:
        print(f"hpcddp: not recorded: {error}", flush=True)


def _record_loss(run: RunDir, number: int, message: Message) -> None:
    """Record when the attempt failed, which of its nodes are lost, and which can be used."""
    if message["ended"]:
        with contextlib.suppress(OSError):
            facts = {"time": message["failed"], "usable": message["usable"]}
            write_json(run.attempt(number).failed, facts)
    if lost := message["lost"]:
        text = "; ".join(f"{host}: {why}" for host, why in lost.items())
        all_of_them = len(lost) > 1 and not message["usable"]  # as if this node's network is down
        host = "" if all_of_them else compress_hosts(list(lost))
        error_record.report_for_all(run.attempt(number), "lost", text, host=host)


def find(job: JobRecord, script: int, nodes: int, srun: Sequence[str]) -> Channel:
    """The supervisor of a batch script; it is started if there is none."""
    name = channel.door_of(script)
    try:
        return channel.connect_here(name)
    except OSError:
        door = channel.listen_here(name)
    if os.fork():
        door.close()
        return channel.connect_here(name)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        heartbeat = float(job.spec.get("requeue", {}).get("heartbeat_seconds", SILENT))
        Supervisor(door, script, srun, os.environ["MASTER_ADDR"], nodes, heartbeat).serve()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
