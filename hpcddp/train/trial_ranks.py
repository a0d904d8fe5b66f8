"""Ranks that train several short runs one after the other in one process group; compare/trial.py
starts them.

    python -P -m hpcddp.train.trial_ranks FILE    with the ranks' variables

FILE is a JSON object: "train" lists the run folders, in order; "look" lists others, which rank 0
checks beforehand; the reasons against them go into their error.json. An error ends the process: a
process group that has lost a rank cannot train again.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from hpcddp import record, spec, strategy
from hpcddp.attempt import exit_codes
from hpcddp.attempt.error_record import report
from hpcddp.attempt.rank_exit import end, hung
from hpcddp.preempt import Preemption
from hpcddp.processes import die_with_parent
from hpcddp.rundir import RunDir
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout
from hpcddp.topology import Rank
from hpcddp.train.input import batches
from hpcddp.train.job import join, train_in
from hpcddp.train.monitor.heartbeat import Heartbeat
from hpcddp.train.parallel import cut, layer_plan
from hpcddp.train.parallel.pipeline import stages_of
from hpcddp.train.rank import task_module as tasks
from hpcddp.train.rank.task_module import Task
from hpcddp.train.rank.world import World

RANDOM = "note: the model has {}: ranks draw different random numbers, so losses differ"
STATISTICS = (
    "note: the model has {}: each rank uses statistics of its own samples, so losses differ"
)
NOTES: dict[type[nn.Module], str] = {
    nn.modules.dropout._DropoutNd: RANDOM,
    nn.modules.batchnorm._BatchNorm: STATISTICS,
}


def main(file: str) -> int:
    """Check and train; the exit code."""
    die_with_parent()
    rank, todo = Rank.from_env(os.environ), json.loads(Path(file).read_text())
    if others := [RunDir(path) for path in todo["look"]]:
        _stay_with(others)
        look(others)
    world: World | None = None
    for run in map(RunDir, todo["train"]):
        heartbeat = Heartbeat()
        try:
            job = record.read(run)
            asked = spec.from_dict(job.spec, str(run.job))
            run.attempt(1).sending.mkdir(parents=True, exist_ok=True)
            world = world or join(rank, job, os.environ)
            train_in(world, run, 1, asked, job.workdir, Preemption(), heartbeat=heartbeat,
                     on_hang=hung, evaluates=False)  # fmt: skip
        except Exception as error:
            stepped = heartbeat.taken > 0
            text = report(error, run.attempt(1), rank.world_rank, stepped=stepped)
            print(text, file=sys.stderr)
            return exit_codes.FAILED
        gc.collect()  # the next run measures only its own memory
        if world.is_main:
            shutil.rmtree(run.checkpoints, ignore_errors=True)
    if world:
        world.barrier()  # a rank that exits early breaks transfers to other ranks
    return exit_codes.DONE


def _stay_with(others: Sequence[RunDir]) -> None:
    """Use the CPU if the other ranks do: there are fewer GPUs than ranks."""
    most = max(record.read(run).world_size for run in others)
    if torch.cuda.is_available() and torch.cuda.device_count() < most:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def look(runs: Sequence[RunDir]) -> None:
    """Record which of these runs are impossible, by the task and its model alone."""
    task, whole = None, nn.Module()
    for run in runs:
        try:
            job = record.read(run)
            asked = spec.from_dict(job.spec, str(run.job))
            if task is None:  # a second import would make other classes than the model's
                loaded = tasks.load(asked, job.workdir)
                task, whole = loaded, loaded.model()
                _remark(whole)
            check(task, whole, asked, strategy.layout(asked.strategy, 1, job.gpus_per_node))
        except Exception as error:
            print(report(error, run.attempt(1), None, stepped=False), file=sys.stderr)


def check(task: Task, whole: nn.Module, asked: JobSpec, layout: Layout) -> None:
    """Divide a model as a layout requires.

    Raises:
        JobFileError: that is impossible.
    """
    cut.blocks(task, whole)
    if layout.tp > 1:
        layer_plan.tp_plan(task, whole, layout.tp)
    if layout.pp > 1:
        cut.stages(task, whole, stages_of(asked, layout.pp))
    share = asked.global_batch // layout.data_size
    batches.split(share, asked.train.micro_batch, *batches.chunks(asked, layout))


def _remark(whole: nn.Module) -> None:
    """Print which layers change the loss of the same samples on more ranks."""
    for kind, text in NOTES.items():
        matches = (m for m in whole.modules() if isinstance(m, kind) and getattr(m, "p", True))
        if first := next(matches, None):
            print(text.format(type(first).__name__), flush=True)


if __name__ == "__main__":
    end(main(sys.argv[1]))
