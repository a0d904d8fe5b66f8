"""Where a model is cut, and what is said where it cannot be."""

import gc
from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from cut_task import Two, task
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from hpcddp.errors import JobFileError
from hpcddp.train.parallel import cut
from hpcddp.train.parallel.model import autocast


def chain() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(4, 4), relu=nn.ReLU(), second=nn.Linear(4, 4), last=nn.Linear(4, 2)
        )
    )


def test_a_stage_keeps_the_names_and_gives_what_the_whole_gives() -> None:
    whole, x = chain(), torch.randn(3, 4)
    stages = [cut.Chain(whole, names) for names in cut.stages(task(), whole, 3)]
    value = x
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, whole(x))
    assert [name for stage in stages for name in stage.state_dict()] == list(whole.state_dict())


def test_a_task_says_what_follows_what_also_inside_of_its_parts() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
            self.head = nn.Linear(4, 2)

    whole = Deep()
    says = task(parts=lambda model: ["body.0", "body.1", "head"])
    first, second = (cut.Chain(whole, names) for names in cut.stages(says, whole, 2))
    assert [*first.state_dict(), *second.state_dict()] == list(whole.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(second(first(x)), whole.head(whole.body[1](whole.body[0](x))))


def test_what_a_pipeline_cannot_cut_is_said() -> None:
    with pytest.raises(JobFileError, match="pp cannot divide a Two: the order of") as caught:
        cut.stages(task(), Two(), 2)
    assert "define parts(model)" in str(caught.value)
    with pytest.raises(JobFileError, match="4 stages from 3 parts: first, relu, second, last"):
        cut.stages(task(), chain(), 4)
    with pytest.raises(JobFileError, match=r"parts\(\) names 'c', which is not in the model"):
        cut.stages(task(parts=lambda model: ["a", "c"]), Two(), 2)
    with pytest.raises(JobFileError, match=r"parts\(\) leaves out b\.weight"):
        cut.stages(task(parts=lambda model: ["a"]), Two(), 1)
    tied = chain()
    tied.last.weight = nn.Parameter(torch.ones(2, 4))
    tied.second.weight = tied.first.weight
    with pytest.raises(JobFileError, match=r"a parameter of .* is shared with another stage"):
        cut.stages(task(), tied, 3)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_a_division_has_neighbours_and_the_smallest_largest_group(
    sizes: list[int], count: int
) -> None:
    if sum(size > 0 for size in sizes) < count:
        return
    pieces = cut.divide(sizes, count)
    assert [i for piece in pieces for i in piece] == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in piece) for piece in pieces]
    assert all(loads)
    # No division does better: filled greedily, less does not go into as many groups.
    groups, load = 1, 0
    for size in sizes:
        load += size
        if load > max(loads) - 1:
            groups, load = groups + 1, size
    assert groups > count or max(sizes) == max(loads)


def test_blocks_are_the_tasks_or_the_members_of_the_largest_list() -> None:
    deep = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(9, 9) for _ in range(3))))
    assert cut.blocks(task(), deep) == ["0", "1"]
    assert cut.blocks(task(), nn.Sequential(nn.ReLU(), nn.Linear(2, 2))) == ["1"]
    assert cut.blocks(task(), Two()) == []
    assert cut.blocks(task(blocks=lambda model: ["b"]), Two()) == ["b"]
    with pytest.raises(JobFileError, match=r"blocks\(\) names 'x'"):
        cut.blocks(task(blocks=lambda model: ["x"]), Two())


def test_a_block_is_something_that_is_called() -> None:
    """A list of modules is not: what is in it is."""
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)]) for _ in range(2))
    deep = nn.ModuleDict({"layers": pairs, "head": nn.Linear(9, 2)})
    assert cut.blocks(task(), deep) == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]
    with pytest.raises(JobFileError, match=r"blocks\(\) names layers.0, which has no forward\(\)"):
        cut.blocks(task(blocks=lambda model: ["layers.0"]), deep)


def test_a_module_that_is_used_twice_is_a_part_twice() -> None:
    act, norm, x = nn.GELU(), nn.LayerNorm(4), torch.randn(3, 4)
    whole = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, norm, nn.Linear(4, 4), norm)
    assert cut.parts(task(), whole) == list("0123456")
    value = x
    for names in (["0", "1", "2"], ["3", "4", "5", "6"]):
        value = cut.Chain(whole, names)(value)
    assert torch.equal(value, whole(x))


def test_of_blocks_that_are_computed_again_no_half_precision_copy_stays() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    others = tensors()  # of the tests before
    try:
        whole = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
        names, mesh = ["0", "1", "2"], init_device_mesh("cpu", (1,))
        cut.recompute(whole, names)
        cut.shard(whole, names, mesh)
        with autocast(torch.device("cpu"), "bf16", divided=True):
            loss = whole(torch.ones(4, 32)).sum()
            halves = [t for t in tensors() if t.dtype is torch.bfloat16 and t.numel() == 32 * 32]
            assert not [t for t in halves if not any(t is other for other in others)]
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in whole.parameters())
        with pytest.raises(JobFileError, match=r"fsdp cannot divide the model: .*scalar"):
            cut.shard(Scaled(), [], mesh)
    finally:
        dist.destroy_process_group()


def tensors() -> list[torch.Tensor]:
    """All of this process."""
    return [t for t in gc.get_objects() if type(t) is torch.Tensor]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def test_activations_computed_again_give_the_same_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), torch.randn(3, 4)
    gradients = []
    for again in (False, True):
        if again:
            cut.recompute(model, ["0", "1"])
        torch.manual_seed(0)
        model.zero_grad()
        model(x).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
