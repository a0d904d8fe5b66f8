"""What a checkpoint holds, and who writes which part of it."""

import subprocess

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn.parallel import DistributedDataParallel

from hpcddp.errors import CheckpointError
from hpcddp.train.parallel.optim_state import begin
from hpcddp.train.parallel.state_dict import Where, pack, parts, share, unpack


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
def test_a_restore_has_the_tensors_that_were_saved(model, optimizer):
    """Under the names that torch's own getter gives them."""
    module, steps = stepped(MODELS[model](), OPTIMIZERS[optimizer])
    saved = parts(module, steps)
    assert saved.tensors.keys() == names_of(module, steps)
    fresh = MODELS[model]()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    begun = OPTIMIZERS[optimizer](fresh.parameters())
    begin(fresh, begun, set(saved.tensors))
    there = parts(fresh, begun)
    assert {n: t.shape for n, t in there.tensors.items()} == {
        n: t.shape for n, t in saved.tensors.items()
    }
    assert there.where == saved.where
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())
    assert all(p.grad is None for p in fresh.parameters())


def test_a_parameter_without_a_state_there_has_none_after_a_restore():
    module, steps = stepped(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), OPTIMIZERS["adam"])
    first = {name for name in parts(module, steps).tensors if "optim.1" not in name}
    fresh = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fresh[1].weight.grad = torch.ones(3, 3)
    begun = torch.optim.AdamW(fresh.parameters())
    begin(fresh, begun, first)
    assert parts(fresh, begun).tensors.keys() == first
    assert fresh[1].weight.grad.sum() == 9  # what was there stays
    begin(module, steps, first)  # also where the optimizer has it
    assert parts(module, steps).tensors.keys() == first


def stepped(module, kind):
    """A module and its optimizer after a step."""
    steps = kind(module.parameters())
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps.step()
    return module, steps


def names_of(module, steps):
    model, optim = get_state_dict(module, steps)
    states = {
        f"optim.{name}.{key}"
        for name, state in optim["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }
    return states | {f"model.{name}" for name in model}


def test_a_part_under_ddp_has_plain_names():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = nn.Sequential(nn.Linear(3, 3), DistributedDataParallel(nn.Linear(3, 3)))
        module, steps = stepped(module, torch.optim.AdamW)
        saved = parts(module, steps)
        assert saved.tensors.keys() == names_of(module, steps)
        del module, steps, saved
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
    where = {name: Where(t.shape, (0,), tuple(range(ranks))) for name, t in tensors.items()}
    shares = [share(tensors, where, rank) for rank in range(ranks)]
    assert sorted(name for part in shares for name in part) == sorted(tensors)
    loads = [sum(t.numel() for t in part.values()) for part in shares]
    assert max(loads) <= max(1000, 1.15 * sum(sizes) / ranks)


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
