"""Useful step time over the time that nodes are held, with a preemption after 30 s of each attempt.

On a real Slurm on this machine: 2 nodes x 2 ranks, steps that sleep 0.2 s, and on our side a
checkpoint every 100 steps (the default). 30 s after a job has got its nodes, a job of higher
priority needs them; each side is preempted twice. Useful steps are those in the newest checkpoint
when the last attempt has released its nodes; later steps are lost. Useful time is their number
times the median time of our steps, for both sides. Nodes are held from the start of an attempt
until Slurm has them back (resolution 0.1 s). The time for which Slurm holds a requeued job is not
counted, and is shortened for both sides.

The floor of the first row is submitit_job.py: a submitit callable whose checkpoint() saves. A
preemption here sends only TERM. submitit ignores TERM (by its manual it needs a site that sends the
user's signal), so checkpoint() is not called, and each attempt starts at step 0. In the second row
submitit's job also saves every 100 steps, as ours does; its figure depends on the time between the
last save and the preemption. The floor of the third row is the best
possible figure: all time from the first step of each attempt counts as useful.

A round takes five minutes. There is one round for every four --pairs: three by default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import preempted
from benchmarks.measure import Row
from benchmarks.preempted import records, state, until
from benchmarks.site import PYTHON, Site, output
from hpcddp.attempt import ledger
from hpcddp.attempt.requeue import SETTLE

BESIDE, ALLOWED = 1.5, 0.9
LIFE, LIVES = 30.0, 2  # seconds from the start of an attempt to its preemption; attempts
WIDTH, EVERY, PAUSE = 256, 100, 0.2
JOB = str(Path(__file__).with_name("submitit_job.py"))


class Lives(NamedTuple):
    """The outcome of one side's attempts."""

    held: float  # seconds for which the nodes were held
    began: list[float]  # start of each attempt, seconds since the epoch
    steps: int  # optimizer steps in the newest checkpoint


def rows(site: Site) -> Iterator[Row]:
    ours, allowed = [], []
    theirs: dict[int, list[float]] = {0: [], EVERY: []}
    rounds = -(-site.pairs // 4)
    for number in range(rounds):
        print(f"goodput: {number + 1} of {rounds}", file=sys.stderr)
        mine, started, step = _ours(site)
        ours.append(mine.steps * step / mine.held)
        for every, found in theirs.items():
            other = _submitit(site, every)
            found.append(other.steps * step / other.held)
        allowed.append((mine.held - started) / mine.held)
    yield Row("goodput, submitit", ours, theirs[0], unit="", ratio_least=BESIDE)
    yield Row("goodput, submitit that saves", ours, theirs[EVERY], unit="", ratio_least=1.0)
    yield Row("goodput, start-up", ours, allowed, unit="", ratio_least=ALLOWED)


def _lives(site: Site, job_id: str, saved: Callable[[], int]) -> Lives:
    """Preempt a job in each of its attempts, and cancel it after the last."""
    held, begins = 0.0, []
    for number in range(LIVES):
        until("the start of an attempt", lambda: state(site, job_id) == "RUNNING")
        begins.append(time.time())
        time.sleep(LIFE)
        preempted.take_nodes(site)
        until("free nodes", partial(_free, site, job_id))
        held += time.time() - begins[-1]
        if number + 1 < LIVES:
            _hurry(site, job_id)
    steps = saved()
    site.slurm_says("scancel", job_id)
    until("the job's end", lambda: not site.slurm_says("squeue", "--noheader"))
    return Lives(held, begins, steps)


def _free(site: Site, job_id: str) -> bool:
    return state(site, job_id) not in preempted.HOLDS


def _hurry(site: Site, job_id: str) -> None:
    """Shorten the two minutes for which Slurm holds a requeued job."""
    if state(site, job_id) == "PENDING":
        site.slurm_says("scontrol", "update", f"JobId={job_id}", f"StartTime=now+{SETTLE}")


def _ours(site: Site) -> tuple[Lives, float, float]:
    """Our attempts, their seconds before the first step, and the seconds of a step."""
    job_id, run = preempted.submit(
        site, max_steps=100_000, model__width=WIDTH, dataset__width=WIDTH, dataset__pause=PAUSE
    )
    found = _lives(site, job_id, lambda: ledger.newest_step(run) or 0)
    lives = range(1, LIVES + 1)
    first = sum(records(run, n, "start")[0]["time"] for n in lives)
    steps = [r["step_s"] for n in lives for r in records(run, n, "train")]
    return found, first - sum(found.began), median(steps)


def _submitit(site: Site, every: int) -> Lives:
    """The attempts of submitit's job."""
    folder = site.fresh()
    argv = [PYTHON, "-P", JOB, str(folder), str(WIDTH), str(every), str(PAUSE)]
    job_id = output(argv, site.slurm, folder).split()[-1]
    step = folder / "step"
    return _lives(site, job_id, lambda: int(step.read_text()) if step.exists() else 0)
