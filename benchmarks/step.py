"""The trainer's step with its metrics, beside a hand-written DDP loop, on 2 ranks of this machine.

The same launcher starts both sides as two processes. They train the same model on the same data
with the same batch size, a DistributedSampler's order and the same number of steps. Steps after a
warm-up are timed by rank 0's wall clock: on our side with the times of the train records in
metrics.jsonl, so that the records, the reduction of metrics, the schedule and the votes on a stop
count; in the loop with the time after an optimizer step. Evaluation and checkpoint come later.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp.attempt.rendezvous import free_port
from hpcddp.rundir import RunDir, read_lines

LIMIT = 1.05
RANKS = 2
BATCH, WIDTH = 48, 24  # per rank, as in jobs/digits.toml: at least 5 ms on one core
WARM_UP, STEPS = 50, 400  # the trainer's records are 10 steps apart
LAST = WARM_UP + STEPS
LOOP = str(Path(__file__).with_name("ddp_loop.py"))
KEYS = {
    "global_batch": RANKS * BATCH,
    "model.width": WIDTH,
    "epochs": 0,
    "max_steps": LAST,
    "checkpoint.every": 0,
    "train.eval_every": 0,
}


def rows(site: Site) -> Iterator[Row]:
    ours, floor = site.interleave("step", lambda: _ours(site), lambda: _floor(site))
    yield Row("step", ours, floor, ratio_limit=LIMIT)


def _ours(site: Site) -> float:
    folder = site.fresh()
    keys = [word for key, value in KEYS.items() for word in ("--set", f"{key}={value}")]
    shape = ["--cluster", "local", "--nodes", "1", "--gpus", str(RANKS)]
    script = folder / "job.sh"
    script.write_text(output([HPCDDP, "render", *shape, *keys], site.environ, folder))
    output(["bash", str(script)], site.environ, folder)
    (run,) = (folder / "runs").iterdir()
    records = read_lines(RunDir(run).attempt(1).metrics)
    times = {r["step"]: r["time"] for r in records if r["event"] == "train"}
    return float(times[LAST] - times[WARM_UP]) / STEPS


def _floor(site: Site) -> float:
    stamps = site.fresh() / "stamps"
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)  # as in the script of our side
    environ = site.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(threads),
    }
    loop = [PYTHON, "-P", LOOP, str(stamps), str(LAST), str(BATCH), str(WIDTH)]
    command = [PYTHON, "-P", "-m", "hpcddp.launch.spawn", "1", str(RANKS), *loop]
    output(command, environ, stamps.parent)
    times = json.loads(stamps.read_text())
    return float(times[LAST - 1] - times[WARM_UP - 1]) / STEPS
