"""The cost of a checkpoint for the training loop, beside torch.save of the same state.

One rank trains a stack of wide layers with AdamW: 201 MB of weights and optimizer state, steps of
at least 100 ms on the CPU. It saves a checkpoint every few steps. Our figure is the time for which
the loop waited in a save, as rank 0 records it (`blocked_s`): the copies made at once, the wait for
the copy that runs during the next forward and backward pass, and the wait for an earlier save. The
floor is torch.save of the same tensors and fsync, in a new process on the same file system. Each
measurement is the median of its saves.

The second row has no limit: the time of a step during a save, beside the steps of the same run
between saves. With a GPU the saving thread has its own core; here it shares the cores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_lines

LIMIT = 0.1
STEP_LIMIT = 0.1  # seconds: the limit does not apply to shorter steps
SAVES, EVERY = 3, 10  # without the first save, which also allocates the memory for the copies
TASK = """
import torch
from torch import nn

def model(width=2048, depth=4):
    layers = [nn.Linear(width, width, bias=False) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 2))

def dataset(split, size=4096, width=2048):
    if split == "train":
        x = torch.randn(size, width, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
FLOOR = """
import json, os, sys, time, torch, task
model = task.model()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
task.loss(model(torch.randn(4, 2048)), torch.zeros(4, dtype=torch.long)).backward()
optimizer.step()
times = []
for _ in range(int(sys.argv[1])):
    began = time.perf_counter()
    with open("state.pt", "wb") as f:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f)
        f.flush()
        os.fsync(f.fileno())
    times.append(time.perf_counter() - began)
    os.unlink("state.pt")
print(json.dumps(times))
"""
JOB = f"""
task = "task.py"
global_batch = 96
max_steps = {EVERY * (SAVES + 2)}
[train]
log_every = 1
[checkpoint]
every = {EVERY}
best = ""
"""


def rows(site: Site) -> Iterator[Row]:
    during: list[float] = []
    alone: list[float] = []

    def ours() -> float:
        found = list(_records(site))
        blocked = [r["blocked_s"] for r in found if r["event"] == "checkpoint"][1 : SAVES + 1]
        saved, free = _steps(found)
        if median(free) < STEP_LIMIT:
            raise HpcddpError(f"steps are too short: {median(free):.3f} s, expected {STEP_LIMIT} s")
        during.append(median(saved))
        alone.append(median(free))
        return float(median(blocked))

    taken, floor = site.interleave("save", ours, lambda: median(_floor(site)[1:]))
    yield Row("save, blocked", taken, floor, ratio_limit=LIMIT)
    yield Row("save, steps", during[1:], alone[1:])  # without the first measurement


def _records(site: Site) -> Iterator[dict[str, Any]]:
    folder = site.fresh()
    (folder / "task.py").write_text(TASK)
    (folder / "save.toml").write_text(JOB)
    script = folder / "job.sh"
    shape = ["--cluster", "local", "--nodes", "1", "--gpus", "1"]
    script.write_text(output([HPCDDP, "render", "save.toml", *shape], site.environ, folder))
    output(["bash", str(script)], site.environ, folder)
    (run,) = (folder / "runs").iterdir()
    return read_lines(RunDir(run).attempt(1).metrics)


def _steps(records: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds of each step during a save, and of each other step, by the wall clock."""
    spans = [(_began(records, r["step"]), r["time"]) for r in records if r["event"] == "checkpoint"]
    trained = [r for r in records if r["event"] == "train" and r["step"] > 1]
    during: list[float] = []
    alone: list[float] = []
    for before, after in pairwise(trained):
        start, end = before["time"], after["time"]
        busy = any(start < last and end > first for first, last in spans)
        (during if busy else alone).append(end - start)
    return during, alone


def _began(records: list[dict[str, Any]], step: int) -> float:
    """The start of a step's save: directly after the record of the step."""
    return float(next(r["time"] for r in records if r["event"] == "train" and r["step"] == step))


def _floor(site: Site) -> list[float]:
    folder = site.fresh()
    (folder / "task.py").write_text(TASK)
    found: list[float] = json.loads(
        output([PYTHON, "-c", FLOOR, str(SAVES + 1)], site.environ, folder)
    )
    return found
