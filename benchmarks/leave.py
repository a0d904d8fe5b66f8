"""Time from the warning of a preemption to free nodes, beside a step and a save.

On a real Slurm on this machine: 2 nodes x 2 ranks, steps of 0.2 s, a checkpoint of 53 MB, and a job
of higher priority that needs both nodes. A measurement starts with the signal, as rank 0 records
it, and ends when the job no longer holds its nodes (resolution 0.1 s). The floor is the same run's
median step plus its save at the preemption. The limit is 1.5 times the floor plus 2 s, for the end
of the ranks and of the Slurm job.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from statistics import median

from benchmarks import preempted
from benchmarks.measure import Row
from benchmarks.preempted import records, until
from benchmarks.site import Site

LIMIT, ALLOWANCE = 1.5, 2.0
WIDTH = 2100  # 4.4 million weights


def rows(site: Site) -> Iterator[Row]:
    taken = []
    for number in range(site.pairs):
        print(f"leave: {number + 1} of {site.pairs}", file=sys.stderr)
        taken.append(_take(site))
    ours, floor = ([pair[side] for pair in taken] for side in (0, 1))
    yield Row("leave", ours, floor, ratio_limit=LIMIT, allowance=ALLOWANCE)


def _take(site: Site) -> tuple[float, float]:
    """Seconds from the signal to free nodes, and those of a step and a save."""
    job_id, run = preempted.submit(
        site, max_steps=10_000, model__width=WIDTH, dataset__width=WIDTH,
        checkpoint__every=15, train__log_every=5,
    )  # fmt: skip
    until("the first checkpoint", lambda: records(run, 1, "checkpoint"))
    preempted.take_nodes(site)
    until("the end of the ranks", lambda: records(run, 1, "end"))
    until("free nodes", lambda: preempted.state(site, job_id) not in preempted.HOLDS)
    free = time.time()
    (end,) = records(run, 1, "end")
    site.slurm_says("scancel", job_id)
    until("the job's end", lambda: not site.slurm_says("squeue", "--noheader"))
    step = median(r["step_s"] for r in records(run, 1, "train")[1:])
    return free - end["asked"], step + records(run, 1, "checkpoint")[-1]["seconds"]
