"""What a checkpoint holds, and who writes which part of it."""

import json
import subprocess
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import CheckpointError
from hpcddp.train.state import State, like, pack, parts, share, unpack


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    return model


def compiled():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1] = torch.compile(model[1], backend="eager")
    return model


MODELS = {"tied": tied, "compiled": compiled, "plain": lambda: nn.Sequential(nn.Linear(3, 3))}
OPTIMIZERS = {
    "adam": torch.optim.AdamW,
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "no state": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_save_gives_the_names_that_a_restore_looks_for(model, optimizer):
    module = MODELS[model]()
    steps = OPTIMIZERS[optimizer](module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps.step()
    found = parts(module, steps)
    ours, theirs = found.stepped | found.loose, State(module, steps).tensors
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_part_under_ddp_has_plain_names():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Sequential(nn.Linear(3, 3), DistributedDataParallel(nn.Linear(3, 3)))
        steps = torch.optim.AdamW(module.parameters())
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        steps.step()
        found = parts(module, steps)
        assert (found.stepped | found.loose).keys() == State(module, steps).tensors.keys()
        del module, steps, found, parameter
    finally:
        dist.destroy_process_group()


def test_what_a_forward_pass_changes_is_told_apart():
    """Also parameters that the optimizer has not, such as a teacher's."""
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD([*module[0].parameters(), *module[1].parameters()], lr=0.1)
    buffers = {f"model.1.{name}" for name, _ in module[1].named_buffers()}
    teacher = {"model.2.weight", "model.2.bias"}
    assert parts(module, optimizer).loose.keys() == buffers | teacher


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_share_the_writing_and_each_tensor_is_written_once(ranks):
    sizes = [1000, 1000, 990, 500, 500, 20, 3, 1, 1, 1]
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate(sizes)}
    shares = [share(tensors, rank, ranks) for rank in range(ranks)]
    assert sorted(name for part in shares for name in part) == sorted(tensors)
    loads = [sum(t.numel() for t in part.values()) for part in shares]
    assert max(loads) <= max(1000, 1.15 * sum(sizes) / ranks)


def test_what_went_through_json_gets_its_types_back():
    live = {
        "counted": Counter({3: 1, 8: 2}),
        "inner": [{"betas": (0.9, 0.99), "by_step": {0.5: None}}],
        "rate": torch.tensor(0.5, dtype=torch.float64),
        "empty": {},
        "last": 4,
    }
    text = json.dumps(live, default=lambda tensor: tensor.tolist())
    assert like(json.loads(text), live) == live
    other = {"counted": Counter({5: 1}), "inner": [], "rate": 0.1, "empty": {1: 2}, "last": 0}
    found = like(json.loads(text), other)
    assert found["counted"] == {3: 1, 8: 2} and type(found["counted"]) is Counter
    assert found["last"] == 4 and other["counted"] == {5: 1}


def test_a_state_that_is_no_tensor_is_named():
    class Odd(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

        def set_extra_state(self, state):
            pass

    module = Odd(2, 2)
    with pytest.raises(CheckpointError, match="_extra_state is not a tensor"):
        parts(module, torch.optim.SGD(module.parameters(), lr=0.1))


class Holds:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "plain": [1, {"two": (3.5, None)}]}


def test_what_else_there_is_comes_back_and_runs_nothing():
    back = unpack(pack(Holds(torch.arange(3))))
    assert back.pop("value").tolist() == [0, 1, 2]
    assert back == {"plain": [1, {"two": (3.5, None)}]}
    with pytest.raises(CheckpointError, match="the state of Holds cannot be saved"):
        pack(Holds(subprocess.Popen))
