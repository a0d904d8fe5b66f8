"""An attempt's ranks, run by the parents of its nodes: the attempt's part.

It asks the supervisor of the batch script (supervisor.py) to run them, and waits for their end. The
first attempt in an allocation starts the supervisor.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence

from hpcddp import record
from hpcddp.attempt import error_record
from hpcddp.attempt.link import channel
from hpcddp.attempt.link.channel import Channel, Message
from hpcddp.attempt.link.supervisor import Supervisor
from hpcddp.preempt import ignore_stop_signals
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir
from hpcddp.slurm.hostlist_writer import compress_hosts

HEARTBEAT = 10.0  # seconds, where the job says nothing
PASSED = ("HPCDDP_", "MASTER_")  # variables that differ between attempts


def run(run: RunDir, number: int, script: int, nodes: int, srun: Sequence[str]) -> int:
    """Run the ranks of an attempt; their exit code. TERM and INT end them, USR2 is passed on.

    Args:
        script: process id of the batch script.
        nodes: of the allocation.
        srun: the command that starts the parents, one on each node.
    """
    came: list[int] = []
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(stop, lambda number, frame: came.append(number))
    job = record.read(run)
    supervisor = find(job, script, nodes, srun)
    environ = {name: text for name, text in os.environ.items() if name.startswith(PASSED)}
    most = min(nodes - int(job.spec.get("spares", 0)), job.nodes[1])
    supervisor.send(start=number, least=job.nodes[0], most=most, environ=environ)
    while not supervisor.closed:
        select.select([supervisor], [], [], 0.1)
        while came:
            sent = came.pop(0)
            supervisor.send(**({"signal": sent} if sent == signal.SIGUSR2 else {"end": True}))
        for message in supervisor.receive():
            if "ended" in message:
                _record_loss(run, number, message)
                ignore_stop_signals()  # a signal during Python's exit would change the exit code
                return int(message["ended"])
    print("hpcddp: the supervisor of the ranks has ended", flush=True)
    return 1


def _record_loss(run: RunDir, number: int, message: Message) -> None:
    """Record that nodes of the attempt are lost, and how many are left for the next one."""
    if lost := message["lost"]:
        text = "; ".join(f"{host}: {why}" for host, why in lost.items())
        facts = {"host": compress_hosts(list(lost)), "left": message["left"]}
        error_record.report_for_all(run.attempt(number), "lost", text, **facts)


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
        heartbeat = float(job.spec.get("requeue", {}).get("heartbeat_seconds", HEARTBEAT))
        Supervisor(door, script, srun, os.environ["MASTER_ADDR"], nodes, heartbeat).serve()
    finally:
        os._exit(0)
