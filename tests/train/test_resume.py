"""Exact resume: what a run is after many lives is what it would be after one.

The traces tell: every step's samples and loss, rank by rank, as the ranks themselves wrote them.
"""

import json
import sys

import pytest
import torch
from ranks import Ranks, global_steps, make_run, one_rank, records

from hpcddp.preempt import Preemption
from hpcddp.rundir import read_lines
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import checkpoint, dcp_files
from hpcddp.train.job import train
from hpcddp.train.rank.world import leave

# Each sample draws from all three generators, and some draw more than others.
AUGMENT = """
import random
import numpy

class Noisy(torch.utils.data.Dataset):
    def __init__(self, inner):
        self.inner = inner
    def __len__(self):
        return len(self.inner)
    def __getitem__(self, i):
        x, y = self.inner[i]
        x = x + 0.1 * torch.randn(4, dtype=torch.float64)
        if random.random() < 0.5:
            x = x * numpy.random.uniform(0.5, 1.5)
        return x, y

_dataset = dataset
def dataset(split, size=37, held_out=7):
    return Noisy(_dataset(split, size, held_out))
"""
JOB = {"extra": AUGMENT, "global_batch": 8, "dataset__size": 43, "max_steps": 20,
       "train__micro_batch": 4, "train__trace": True, "checkpoint__best": ""}  # fmt: skip

LONG = JOB | {"dataset__size": 203, "max_steps": 50}  # 25 steps an epoch


def live(run, attempt, steps):
    """A life that is asked to stop once it took so many steps, and stops soon after."""
    sys.modules.pop("small_task", None)
    preemption, seen = Preemption(), []

    def ask(record):
        seen.append(record["event"] == "train")
        preemption.requested = sum(seen) >= steps

    outcome = train(run, Rank(0, 1, 0, 1, 0), attempt, preemption, None, ask)
    leave()
    return outcome


def trace(run, *attempts, rank=0):
    """The lines of these attempts, one after the other."""
    return [x for n in attempts for x in run.attempt(n).trace(rank).read_text().splitlines()]


def last(run):
    """Every tensor of the newest checkpoint: weights, optimizer and random generators."""
    return dcp_files.read_all(checkpoint.complete(run.checkpoints)[0])


def assert_equal(first, second):
    assert first.keys() == second.keys() and len(first) > 10
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize("workers", [0, 2])
def test_four_lives_are_one(tmp_path, workers):
    """5 steps an epoch; accumulation, dropout, augmentation."""
    job = JOB | {"model__dropout": 0.3, "data__workers": workers}
    whole, parts = make_run(tmp_path / "whole", **job), make_run(tmp_path / "parts", **job)
    one_rank(whole)
    for attempt in (1, 2, 3):
        assert live(parts, attempt, 2) == "stopped"
        meta = checkpoint.read_meta(checkpoint.complete(parts.checkpoints)[0])
        assert 0 < meta["samples_consumed"] < 40 and meta["step"] < 20
    assert meta["epoch"] > 0
    assert live(parts, 4, 999) == "done"
    assert trace(parts, 1, 2, 3, 4) == trace(whole, 1)
    assert_equal(last(parts), last(whole))


# The model samples in evaluation too, and the held-out samples are drawn.
RESTLESS = """
import random
import numpy
class Restless(nn.Sequential):
    def forward(self, x):
        return super().forward(x * numpy.random.uniform(0.9, 1.1) + 0.1 * torch.randn_like(x))

_model, _dataset = model, dataset
def model(dropout):
    return Restless(_model(dropout))
def dataset(split, size=37):
    if split == "train":
        return _dataset(split, size)
    x = torch.randn(7, 4, dtype=torch.float64) * random.random()
    return TensorDataset(x, (x.sum(1) > 0).long())
"""


def test_what_an_evaluation_draws_changes_nothing(tmp_path):
    job = JOB | {"extra": RESTLESS, "model__dropout": 0.3}
    whole, parts = make_run(tmp_path / "whole", **job), make_run(tmp_path / "parts", **job)
    one_rank(whole)
    for attempt in (1, 2, 3):
        assert live(parts, attempt, 4) == "stopped"
    assert live(parts, 4, 999) == "done"
    assert trace(parts, 1, 2, 3, 4) == trace(whole, 1)
    assert_equal(last(parts), last(whole))

    def evals(run, *attempts):
        return [(r["step"], r["metrics"]) for n in attempts for r in records(run, "eval", n)]

    assert evals(parts, 1, 2, 3, 4) == evals(whole, 1)


def test_the_number_of_workers_changes_nothing(tmp_path):
    """A process that loads by itself draws for its samples and for dropout, in turn."""
    runs = []
    for workers in (0, 1, 2):
        job = JOB | {"model__dropout": 0.3, "data__workers": workers}
        runs.append(make_run(tmp_path / str(workers), **job))
        one_rank(runs[-1])
    first, *others = runs
    for other in others:
        assert trace(other, 1) == trace(first, 1)
        assert_equal(last(other), last(first))


def test_a_trace_has_every_sample_of_an_epoch_once(tmp_path):
    run = make_run(tmp_path, **JOB | {"epochs": 2, "max_steps": 0, "train__drop_last": False})
    one_rank(run)
    lines = [json.loads(line) for line in trace(run, 1)]
    assert [line["step"] for line in lines] == list(range(1, 13))
    for epoch in (0, 1):
        ids = [line["ids"] for line in lines if line["epoch"] == epoch]
        assert [len(i) for i in ids] == [8] * 5 + [3]
        assert sorted(i for step in ids for i in step) == list(range(43))


def test_a_held_out_sample_is_always_augmented_alike(tmp_path):
    run = make_run(tmp_path, **JOB | {"train__lr": 0.0, "train__weight_decay": 0.0})
    one_rank(run)
    evals = [r for r in read_lines(run.attempt(1).metrics) if r["event"] == "eval"]
    assert len(evals) == 4 and len({json.dumps(r["metrics"]) for r in evals}) == 1


def reshape(run, ranks, step):
    """Give the run another number of ranks, and forget all checkpoints after a step."""
    for folder in checkpoint.complete(run.checkpoints):
        if checkpoint.step_of(folder) > step:
            (folder / "COMPLETE").unlink()
    job = json.loads(run.job.read_text())
    run.job.write_text(json.dumps(job | {"gpus_per_node": ranks}))


def moved(folder, worlds):
    """A run that goes on with other numbers of ranks: {ranks: from which step}."""
    job = LONG | {"checkpoint__every": 5, "checkpoint__keep": 20}
    run = make_run(folder, gpus=next(iter(worlds)), **job)
    found = {}
    for attempt, (ranks, step) in enumerate(worlds.items(), 1):
        reshape(run, ranks, step)
        with Ranks.of(run, ranks, attempt=attempt) as processes:
            assert [(code, err) for code, _, err in processes.wait()] == [(0, "")] * ranks
        here = global_steps(run, attempt, ranks)
        assert list(here) == list(range(step + 1, 51))
        found |= here
    return found


@pytest.mark.parametrize(
    "worlds",
    [{2: 0, 1: 10}, pytest.param({4: 0, 2: 15, 8: 35}, marks=pytest.mark.full)],
    ids=["2-1", "4-2-8"],
)
def test_other_numbers_of_ranks_take_the_same_samples(tmp_path, worlds):
    """In the middle of an epoch: the same global batches in the same order, and their losses."""
    alone = make_run(tmp_path / "alone", **LONG)
    one_rank(alone)
    expected, found = global_steps(alone, 1, 1), moved(tmp_path / "moved", worlds)
    assert {n: ids for n, (ids, _) in found.items()} == {n: i for n, (i, _) in expected.items()}
    ours, theirs = ([loss for _, loss in x.values()] for x in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
