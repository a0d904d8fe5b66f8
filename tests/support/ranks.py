"""Real ranks for tests: run dirs with small tasks, and worker processes that are always ended."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ports
from sites import record_run

from hpcddp import spec
from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_lines
from hpcddp.topology import Rank

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(dropout=0.0):
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 2)).double()

def dataset(split, size=37, held_out=7):
    n = size if split == "train" else held_out
    g = torch.Generator().manual_seed(len(split))
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 0).long()) if n else None

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def metrics(output, target):
    return {"accuracy": output.argmax(1) == target}
"""

# Without buffers, which hsdp cannot divide: two ranks have half of it each.
HALVES = """
def model():
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Dropout(0.3), nn.Linear(9, 2)).double()
"""


def make_run(
    folder: Path,
    task: str = TASK,
    *,
    nodes: tuple[int, int] = (1, 1),
    gpus: int = 1,
    extra: str = "",
    **keys: Any,
) -> RunDir:
    """A run dir as the plan half makes it. Keys are the job's, with `__` for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "small_task.py"
    source.write_text(task + extra)
    values = {"task": str(source), "global_batch": 4, "max_steps": 6, "train.log_every": 1}
    values |= {name.replace("__", "."): value for name, value in keys.items()}
    run = RunDir(folder / "run")
    run.attempts.mkdir(parents=True, exist_ok=True)
    job = spec.to_dict(spec.KEYS.build(values))
    return record_run(run, nodes, gpus, "local", spec=job, workdir=str(folder))


def one_rank(run: RunDir, attempt: int = 1, **options: Any) -> str:
    """Train in this process."""
    from hpcddp import worker
    from hpcddp.train.rank.world import leave

    sys.modules.pop("small_task", None)
    try:
        return worker.run(run, Rank(0, 1, 0, 1, 0), attempt, **options)
    finally:
        leave()  # after an exception, as the end of the process would


def records(run: RunDir, event: str, attempt: int = 1) -> list[dict[str, Any]]:
    return [r for r in read_lines(run.attempt(attempt).metrics) if r["event"] == event]


def wait_for(found: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """What `found` gives once it is true."""
    end = time.monotonic() + seconds
    while not (result := found()):
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return result


# Nothing that changes with the length of the run, and no evaluation.
CALM = {"train__schedule": "constant", "dataset__held_out": 0, "checkpoint__best": "",
        "train__explode": 0.0}  # fmt: skip


def steps(run: RunDir) -> list[int | None]:
    """The steps of the complete checkpoints, newest first."""
    from hpcddp.train.checkpoint import checkpoint

    return [checkpoint.step_of(folder) for folder in checkpoint.complete(run.checkpoints)]


def begin(run: RunDir) -> int:
    """Another life claims the run, although the one before still works."""
    facts = ledger.new_attempt(str(os.getpid()), os.getpid())
    begun = ledger.begin(run, facts, lambda earlier: False)
    assert begun
    return begun.number


# Root may read everything; without these capabilities it is a user like any other.
AS_A_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] * (os.geteuid() == 0)
WORKER = [sys.executable, "-W", "error", "-P", "-m", "hpcddp.worker"]


class Ranks:
    """Worker processes with torchrun's variables; on leaving the context none is left.

    Args:
        words: what each of them runs, before the run dir.
        first: Python code that a rank runs before its worker.
        files: the soft and the hard limit of file descriptors, else this process's.
    """

    def __init__(
        self,
        run: RunDir,
        environs: list[dict[str, str]],
        *,
        attempt: int = 1,
        words: Sequence[str] = WORKER,
        first: str = "",
        files: tuple[int, int] | None = None,
    ) -> None:
        if first:
            code = f"{first}\nimport sys\nfrom hpcddp.worker import Worker\nWorker(sys.argv[1])()"
            words = [*WORKER[:-2], "-c", code]
        self.processes: list[subprocess.Popen[str]] = []
        self._port = ports.held()
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(ports.number(self._port)),
            "HPCDDP_RUN_DIR": str(run.path),
            "HPCDDP_ATTEMPT": str(attempt),
            "HPCDDP_START_TIMEOUT": "60",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        for environ in environs:
            self.processes.append(
                subprocess.Popen(
                    [*words, str(run.path)],
                    env={**os.environ, **common, **environ},
                    preexec_fn=files
                    and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files)),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    @classmethod
    def of(cls, run: RunDir, world: int, **options: Any) -> Ranks:
        """All ranks of one node."""
        environs = [Rank(r, world, r, world, 0).to_env() for r in range(world)]
        return cls(run, environs, **options)

    def met_by(self, rank: int) -> None:
        """Wait until a rank is where all are to meet."""
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", ports.number(self._port), timeout=timedelta(seconds=60))
        store.wait([f"hpcddp/rank/{rank}"])

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self._port.close()

    def wait(self, seconds: float = 90.0) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each rank."""
        ends = []
        for process in self.processes:
            out, err = process.communicate(timeout=seconds)
            ends.append((process.returncode, out, err))
        return ends


def global_steps(run: RunDir, attempt: int, ranks: int) -> dict[int, tuple[list[int], float]]:
    """Each step's samples in their order, and its loss, from the traces of all ranks."""
    found = {}
    traces = [read_lines(run.attempt(attempt).trace(rank)) for rank in range(ranks)]
    for parts in zip(*traces, strict=True):
        assert len({(p["step"], p["epoch"]) for p in parts}) == 1
        ids = [i for row in zip(*(p["ids"] for p in parts), strict=True) for i in row]
        found[parts[0]["step"]] = (ids, sum(p["loss"] for p in parts) / ranks)
    return found


def train_all(folder: Path, size: int, runs: Sequence[tuple[RunDir, int, int, str]]) -> None:
    """Train runs one after the other in one process group of so many ranks.

    Args:
        folder: for what the ranks need to meet.
        runs: each with its attempt, the step at which it is to stop, 0 for never, and its
            strategy, "" for the job's own.
    """
    here, program = Path(tempfile.mkdtemp(dir=folder)), Path(__file__).with_name("spread_ranks.py")
    (here / "runs").write_text(json.dumps([[str(run.path), *how] for run, *how in runs]))
    words = [sys.executable, "-P", str(program)]
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(size):
            given = [str(rank), str(size), str(here / "store"), str(here / "runs")]
            with (here / f"said-{rank}").open("w") as said:
                processes.append(
                    subprocess.Popen([*words, *given], env=environ, stdout=said, stderr=said)
                )
        while all(process.poll() in (None, 0) for process in processes):
            if all(process.poll() == 0 for process in processes):
                return
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode > 0]
    raise AssertionError("\n".join((here / f"said-{r}").read_text()[-3000:] for r in failed))
