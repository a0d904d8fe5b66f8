"""What a step costs that could be saved at a failure, beside the same step of the same ranks.

Two ranks run on this machine, each as a node of its own with a parent. The parents send heartbeats
to the supervisor, and each rank counts its steps and marks the newest one. The model has no
buffers. The floor is the launcher `fork` on such nodes, which does none of this. A figure is of one
optimizer step: its time, and the CPU seconds of all processes of the job, from the step WARM_UP on.

The two jobs of a pair exist at the same time, and run in turn for a quarter of a second: one is
stopped while the other runs. The speed of a machine changes from second to second by more than the
limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp import processes
from hpcddp.attempt.rendezvous import free_port
from hpcddp.rundir import RunDir, read_step

LIMIT = 1.01
NODES = 2  # of one rank
WARM_UP = 50  # steps
BLOCKS, BLOCK = 40, 0.25  # seconds of each block, in which one of the two jobs runs
KEYS = {
    "launcher": "fork",
    "global_batch": NODES * 48,
    "model.width": 24,
    "epochs": 0,
    "max_steps": 1000000,
    "checkpoint.every": 0,
    "train.eval_every": 0,
}
TICK = os.sysconf("SC_CLK_TCK")
PATIENCE = 120.0  # seconds for a start; a job ends by itself after ten times as long


def rows(site: Site) -> Iterator[Row]:
    both: tuple[list[_Cost], list[_Cost]] = ([], [])
    for number in range(site.pairs + 1):  # the first pair fills caches
        for costs, cost in zip(both, _pair(site, number), strict=True):
            costs.append(cost)
        print(f"armed: {number} of {site.pairs}", file=sys.stderr)
    for index, name in enumerate(("armed, step", "armed, CPU of a step")):
        ours, floor = ([cost[index] for cost in costs[1:]] for costs in both)
        yield Row(name, ours, floor, ratio_limit=LIMIT)


_Cost = tuple[float, float]  # seconds of a step, and CPU seconds


def _pair(site: Site, number: int) -> tuple[_Cost, _Cost]:
    """The costs of a step, armed and not. Which job starts first is up to the number: on some
    machines it is the slower one."""
    with ExitStack() as stack:
        order = (True, False) if number % 2 else (False, True)
        jobs = {armed: stack.enter_context(_Job(site, armed)) for armed in order}
        for block in range(BLOCKS):
            for armed in order if block % 2 else order[::-1]:
                jobs[armed].run(BLOCK)
        return jobs[True].cost(), jobs[False].cost()


class _Job:
    """A job on this machine that is stopped, but within `run`; a context manager."""

    def __init__(self, site: Site, armed: bool) -> None:
        self.folder = folder = site.fresh()
        keys = [word for key, value in KEYS.items() for word in ("--set", f"{key}={value}")]
        shape = ["--cluster", "local", "--nodes", str(NODES), "--gpus", "1"]
        output([HPCDDP, "render", *shape, *keys], site.environ, folder)
        (path,) = (folder / "runs").iterdir()
        self.attempt = (run := RunDir(path)).attempt(1)
        self.attempt.path.mkdir(parents=True)
        self.script = subprocess.Popen(["sleep", str(10 * PATIENCE)])
        with open(self.attempt.log, "ab") as log:
            self.job = subprocess.Popen(
                _command(run, self.script.pid, armed), env=_environ(site, run), cwd=folder,
                stdout=log, stderr=log,
            )  # fmt: skip
        self.seconds = 0.0

    def __enter__(self) -> _Job:
        try:
            self._warm_up()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.pids = _all(self.job.pid)  # once: to look for them takes CPU time from the job
        self._stop()
        self.first = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        everyone = _all(self.job.pid)
        for pid in everyone:
            os.kill(pid, signal.SIGCONT)
        for process in (self.script, self.job):
            process.terminate()
            process.wait()

    def run(self, seconds: float) -> None:
        """Let all processes run for a time."""
        began = time.perf_counter()
        for pid in self.pids:
            os.kill(pid, signal.SIGCONT)
        time.sleep(seconds)
        self._stop()
        self.seconds += time.perf_counter() - began

    def cost(self) -> _Cost:
        """The seconds of a step, and its CPU seconds in all processes."""
        (first, before), (last, after) = self.first, self._now()
        return self.seconds / (last - first), (after - before) / (last - first)

    def _stop(self) -> None:
        for pid in reversed(self.pids):  # the ranks first, as their parents watch them
            os.kill(pid, signal.SIGSTOP)

    def _now(self) -> tuple[int, float]:
        return read_step(self.attempt)[0], sum(map(_cpu, self.pids))

    def _warm_up(self) -> None:
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.job.poll() is None:
            if read_step(self.attempt)[0] >= WARM_UP:
                return
            time.sleep(0.01)
        said = self.attempt.log.read_text()[-500:]
        raise RuntimeError(f"step {WARM_UP} did not come: {said}")


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


def _all(pid: int) -> Sequence[int]:
    return [pid, *(below for child in processes.children(pid) for below in _all(child))]


def _cpu(pid: int) -> float:
    """CPU seconds of a process (proc(5), stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK
