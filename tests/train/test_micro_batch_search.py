"""The largest micro-batch that fits into memory, and what the search leaves as it was."""

import pytest
import torch
from ranks import Ranks, make_run, one_rank, records, train_all
from sites import record_run

from hpcddp import record
from hpcddp.errors import JobFileError
from hpcddp.train.checkpoint import dcp_files

# One worker, one group of ranks for all, which the first test waits for.
pytestmark = [pytest.mark.xdist_group("fit"), pytest.mark.timeout(900)]

# A rank has memory for so many samples; random numbers and buffers change in each pass.
TASK = """
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

class Large(nn.Module):
    def __init__(self, most):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2))
        self.out, self.most = nn.Linear(6, 2), most

    def forward(self, x):
        rank = dist.get_rank() if dist.is_initialized() else 0
        if self.training and len(x) > self.most[rank % len(self.most)]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return self.out(self.layers(x))

def model(most=(99,)):
    return Large(most)

def dataset(split):
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(len(split)))
    return TensorDataset(x, (x.sum(1) > 0).long()) if split == "train" else None

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
OWN = """
def optimizer(model, train):
    return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9)
"""
# Memory of this process ends soon after what it has now.
SHORT = """
import resource

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        if self.training:
            torch.empty(len(x), 1 << 26)  # 256 MiB a sample, which nobody touches
        return self.out(x)

def model():
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (3 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return Wide()
"""
KEYS = {"global_batch": 48, "max_steps": 4, "checkpoint__every": 2, "checkpoint__best": "",
        "train__find_micro_batch": True}  # fmt: skip


def state(run, step):
    return dcp_files.read_all(run.checkpoints / f"step-{step}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two ranks, of which one has less memory: in two lives, and as if it had been known."""
    folder, runs = tmp_path_factory.mktemp("fit"), {}
    for name, extra in (("adam", ""), ("own", OWN)):
        keys = {**KEYS, "gpus": 2, "extra": extra, "model": {"most": [24, 5]}}
        runs[name] = make_run(folder / name, TASK, checkpoint__keep=9, **keys)
        keys |= {"train__find_micro_batch": False, "train__micro_batch": 4}
        runs[f"{name} known"] = make_run(folder / f"{name} known", TASK, **keys)
    train_all(folder, 2, [(run, 1, 0, "") for run in runs.values()])
    for name in ("adam", "own"):
        (runs[name].checkpoints / "step-4" / "COMPLETE").unlink()
    train_all(folder, 2, [(runs[name], 2, 0, "") for name in ("adam", "own")])
    train_all(folder, 2, [(runs["own"], 3, 0, "zero1")])
    return runs


@pytest.mark.parametrize("name", ["adam", "own"])
def test_the_rank_with_least_memory_decides(ranks, name):
    (told,) = records(ranks[name], "micro_batch")
    assert (told["size"], told["accumulation"]) == (4, 6)
    assert told["tried"] == [24, 4, 8, 6]
    (start,) = records(ranks[name], "start")
    assert (start["micro_batch"], start["accumulation"]) == (4, 6)


@pytest.mark.parametrize("name", ["adam", "own"])
def test_nothing_of_the_tries_stays_and_a_resume_knows_the_answer(ranks, name):
    found, known = ranks[name], ranks[f"{name} known"]
    assert records(found, "micro_batch", 2) == []
    (start,) = records(found, "start", 2)
    assert (start["step"], start["micro_batch"]) == (2, 4)
    losses = {r["step"]: r["loss"] for n in (1, 2) for r in records(found, "train", n)}
    assert losses == {r["step"]: r["loss"] for r in records(known, "train")}
    one, two = (dcp_files.read_all(run.checkpoints / "step-4") for run in (found, known))
    assert one.keys() == two.keys()
    assert [n for n in one if not torch.equal(one[n], two[n])] == []


def test_another_strategy_searches_again(ranks):
    """Its optimizer takes another share of the memory."""
    (told,) = records(ranks["own"], "micro_batch", 3)
    assert told["size"] == 4


def test_another_number_of_ranks_searches_again(ranks):
    run = ranks["adam"]
    (run.checkpoints / "step-4" / "COMPLETE").unlink()
    job = record.read(run)
    record_run(run, (1, 1), 1, "local", spec=job.spec, workdir=job.workdir)
    assert one_rank(run, 3) == "done"
    (told,) = records(run, "micro_batch", 3)
    assert (told["size"], told["accumulation"], told["tried"]) == (24, 2, [48, 6, 16, 24])


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    run = make_run(tmp_path, TASK, model={"most": [0]}, **KEYS)
    with pytest.raises(JobFileError, match="one sample does not fit into memory") as caught:
        one_rank(run)
    assert caught.value.where == "train.find_micro_batch"
    assert "train.recompute" in caught.value.hint


def test_another_mistake_is_no_lack_of_memory(tmp_path):
    run = make_run(
        tmp_path, TASK, extra="\ndef loss(output, target):\n    raise ValueError\n", **KEYS
    )
    with pytest.raises(ValueError):
        one_rank(run)


def test_memory_that_the_system_refuses_is_none(tmp_path):
    """Of a process that may have 3 GiB more, 8 samples of 256 MiB fit, and 12 do not."""
    run = make_run(tmp_path, TASK, extra=SHORT, **{**KEYS, "global_batch": 24, "max_steps": 1})
    with Ranks.of(run, 1) as started:
        ((code, _, err),) = started.wait()
    assert code == 0, err
    (told,) = records(run, "micro_batch")
    assert (told["size"], told["tried"]) == (8, [24, 4, 8, 12])
