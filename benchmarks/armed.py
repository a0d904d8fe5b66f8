"""What a step costs that could be saved at a failure, beside the same step of the same ranks.

Two ranks on this machine, each as a node of its own with a parent: sockets to the supervisor with
signs of life, steps that are told and marked, buffers that are levelled. The floor is the launcher
`fork` on such nodes, whose ranks have none of it. A figure is of one optimizer step: its time, and
the CPU seconds of all processes of the job, from the step WARM_UP on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Row, interleave
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp import processes
from hpcddp.attempt.rendezvous import free_port
from hpcddp.rundir import RunDir, read_step

LIMIT = 1.01
NODES = 2  # of one rank
WARM_UP, STEPS = 50, 600
KEYS = {
    "launcher": "fork",
    "global_batch": NODES * 48,
    "model.width": 24,
    "epochs": 0,
    "max_steps": WARM_UP + STEPS + 100,
    "checkpoint.every": 0,
    "train.eval_every": 0,
}
TICK = os.sysconf("SC_CLK_TCK")
PATIENCE = 120.0  # seconds for a measurement


def rows(site: Site) -> Iterator[Row]:
    both = {True: list[tuple[float, float]](), False: list[tuple[float, float]]()}

    def take(armed: bool) -> float:
        both[armed].append(_steps(site, armed))
        return both[armed][-1][0]

    interleave(
        [lambda: take(True), lambda: take(False)],
        site.pairs,
        lambda number: print(f"armed: {number} of {site.pairs}", file=sys.stderr),
    )
    for index, name in enumerate(("armed, step", "armed, CPU of a step")):
        ours, floor = ([x[index] for x in both[armed][1:]] for armed in (True, False))
        yield Row(name, ours, floor, ratio_limit=LIMIT)


def _steps(site: Site, armed: bool) -> tuple[float, float]:
    """The seconds of a step, and its CPU seconds in all processes."""
    folder = site.fresh()
    keys = [word for key, value in KEYS.items() for word in ("--set", f"{key}={value}")]
    shape = ["--cluster", "local", "--nodes", str(NODES), "--gpus", "1"]
    output([HPCDDP, "render", *shape, *keys], site.environ, folder)
    (path,) = (folder / "runs").iterdir()
    run = RunDir(path)
    run.attempt(1).path.mkdir(parents=True)
    script = subprocess.Popen(["sleep", str(PATIENCE)])
    with open(run.attempt(1).log, "ab") as log:
        job = subprocess.Popen(
            _command(run, script.pid, armed), env=_environ(site, run), cwd=folder, stdout=log,
            stderr=log,
        )  # fmt: skip
    try:
        first, last = (_reach(run, job, step) for step in (WARM_UP, WARM_UP + STEPS))
    finally:
        for process in (script, job):
            process.terminate()
            process.wait()
    steps = last[0] - first[0]
    return (last[1] - first[1]) / steps, (last[2] - first[2]) / steps


def _command(run: RunDir, script: int, armed: bool) -> list[str]:
    """The ranks of the run, with parents and their supervisor or without."""
    python = [PYTHON, "-P", "-m"]
    worker = [*python, "hpcddp.worker", str(run.path)]
    srun = [*python, "hpcddp.launch.spawn", "--no-label", str(NODES), "1"]
    if not armed:
        return [*srun, *python, "hpcddp.launch.fork", "1", *worker]
    parent = [*python, "hpcddp.launch.parent", "1", *worker]
    host = [*python, "hpcddp.attempt.host", "ranks", str(run.path), "1", str(script), str(NODES)]
    return [*host, *srun, *parent]


def _environ(site: Site, run: RunDir) -> dict[str, str]:
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    mine = {"HPCDDP_RUN_DIR": str(run.path), "HPCDDP_ATTEMPT": "1", "OMP_NUM_THREADS": "1"}
    return {**site.environ, **where, **mine}


def _reach(run: RunDir, job: subprocess.Popen[bytes], step: int) -> tuple[int, float, float]:
    """Wait for a step; a step, its time, and the CPU seconds of all processes then."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and job.poll() is None:
        if (now := read_step(run.attempt(1)))[0] >= step:
            return now[0], now[1], sum(map(_cpu, _all(job.pid)))
        time.sleep(0.01)
    raise RuntimeError(f"step {step} did not come: {run.attempt(1).log.read_text()[-500:]}")


def _all(pid: int) -> Sequence[int]:
    return [pid, *(below for child in processes.children(pid) for below in _all(child))]


def _cpu(pid: int) -> float:
    """CPU seconds of a process (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK
