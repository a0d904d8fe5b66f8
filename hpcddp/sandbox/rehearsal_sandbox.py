"""Rehearsal: its own sandbox, and the job's values for that sandbox."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcddp.planning.jobfile import Layer
from hpcddp.sandbox import time_limits
from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.sandbox.fault_times import DOWN, KINDS
from hpcddp.slurm import environment

Say = Callable[[str], None]

HERE = "the rehearsal"
HANG_SECONDS = 5.0  # silence that counts as a hang, where the job does not set it
KEPT = ("slurm.signal", "slurm.requeue", "slurm.no-requeue")  # the other options are a site's
LIMITS = ("requeue.crashes", "requeue.hangs")  # failures in a row without progress
ENOUGH = 3  # failures for each fault without a warning, which may come with a second one
# Seconds, as on many sites. With a grace shorter than a start, Slurm would end each job that is
# preempted during its start, and hold it for two minutes.
GRACE, KILL_WAIT = 30, 10
# Variables that change the output of Slurm's programs.
FOREIGN = ("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SALLOC_")

# All ranks share this machine, which may have fewer GPUs: the job requests none.
PROFILE = """\
description = "the sandbox of a rehearsal"
template = "slurm.sh.j2"
backend = "slurm"
gpu_option = "none"
poll_seconds = 5
"""


@contextmanager
def own_sandbox(nodes: int, cpus: int, late: bool) -> Iterator[Sandbox]:
    """A sandbox in a new folder. This process and its children use only its Slurm.

    Args:
        late: a lost node can return before Slurm has it down, as one whose daemon restarts.
    """
    with (
        tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp") as home,
        _running(Path(home), nodes, cpus, DOWN[late]) as sandbox,
        _surroundings(sandbox),
    ):
        yield sandbox


@contextmanager
def _running(home: Path, nodes: int, cpus: int, down: int) -> Iterator[Sandbox]:
    """A sandbox below a folder. It ends with the block, also if a signal ends this process."""
    heard = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in heard if main}
    try:
        for number in before:
            signal.signal(number, _interrupt)
        yield _boot(home, nodes, cpus, down)
    finally:
        for number in before:  # a second signal must not interrupt the clean-up
            signal.signal(number, signal.SIG_IGN)
        Sandbox(home / "slurm").down()
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _boot(home: Path, nodes: int, cpus: int, down: int) -> Sandbox:
    prolog, scontrol = home / "prolog", shutil.which("scontrol") or "scontrol"
    prolog.write_text(time_limits.PROLOG.format(folder=home, scontrol=scontrol))
    prolog.chmod(0o755)
    (home / "rehearsal.toml").write_text(PROFILE)
    sandbox = Sandbox(home / "slurm")
    sandbox.up(
        Settings(
            nodes=nodes, gpus=0, cpus=cpus, accounting=False, grace=GRACE, kill_wait=KILL_WAIT,
            extra={"Prolog": str(prolog), "SlurmdTimeout": str(down)},
        )
    )  # fmt: skip
    return sandbox


@contextmanager
def _surroundings(sandbox: Sandbox) -> Iterator[None]:
    """Give this process the environment of the sandbox."""
    before = dict(os.environ)
    kept = {n: v for n, v in environment.clean(before).items() if not n.startswith(FOREIGN)}
    os.environ.clear()
    os.environ.update(kept | sandbox.environ())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def sandboxed(layers: list[Layer], counts: Mapping[str, int], home: Path, say: Say) -> list[Layer]:
    """The job's layers without the values of a site, below the rehearsal's own layer."""
    own, left = Layer(), set()
    kept: list[Layer] = []
    own.put("cluster", str(home / "rehearsal.toml"), HERE)
    own.put("slurm.partition", "low", HERE)
    own.put("slurm.time", time_limits.USUAL, HERE)
    own.put("env.CUDA_VISIBLE_DEVICES", "", HERE)
    own.put("train.trace", True, HERE)
    for name, value in _unless_set(counts).items():
        if not any(name in layer.values for layer in layers):
            own.put(name, value, HERE)
    for layer in layers:
        site = {n for n in layer.values if n.startswith("slurm.") and n not in KEPT}
        left |= site | ({"cluster"} & layer.values.keys())
        values = {n: v for n, v in layer.values.items() if n not in site}
        kept.append(Layer(values, layer.sources))
    if left:
        say(f"keys of a cluster, not used here: {', '.join(sorted(left))}")
    return [own, *kept]


def _unless_set(counts: Mapping[str, int]) -> dict[str, Any]:
    """Values for keys that the job does not set itself."""
    unannounced = sum(count for kind, count in counts.items() if KINDS[kind])
    # Failures close together, without progress between them, are the rehearsal's doing.
    values: dict[str, Any] = dict.fromkeys(LIMITS, ENOUGH * max(1, unannounced))
    return values | ({"train.hang_seconds": HANG_SECONDS} if counts.get("hang") else {})
