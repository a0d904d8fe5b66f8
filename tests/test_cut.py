"""Where a model is cut, and what is said where it cannot be."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec
from hpcddp.train import cut
from hpcddp.train.task import Task


def task(**functions: Any) -> Task:
    """A task that says these things of its model's structure."""
    needed = {name: lambda *args, **options: None for name in ("model", "dataset", "loss")}
    return Task(SimpleNamespace(**needed, **functions), "task.py", JobSpec())


def chain() -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(4, 4), relu=nn.ReLU(), second=nn.Linear(4, 4), last=nn.Linear(4, 2)
        )
    )


class Two(nn.Module):
    """Two layers, and no word about what follows what."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


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
    with pytest.raises(JobFileError, match=r"pp cannot cut a Two.*what follows what") as found:
        cut.stages(task(), Two(), 2)
    assert "define parts(model)" in str(found.value)
    with pytest.raises(JobFileError, match="4 stages of 3 parts: first, relu, second, last"):
        cut.stages(task(), chain(), 4)
    with pytest.raises(JobFileError, match=r"parts\(\) names 'c', which the model has not"):
        cut.stages(task(parts=lambda model: ["a", "c"]), Two(), 2)
    with pytest.raises(JobFileError, match=r"b\.weight is in none of the model's parts"):
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
    found = cut.divide(sizes, count)
    assert [i for piece in found for i in piece] == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in piece) for piece in found]
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


def test_two_layers_with_a_function_between_them_are_shared() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4),
        nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2),
    )  # fmt: skip
    assert cut.pairs(model) == {"0": "colwise", "3": "rowwise"}
    assert cut.pairs(nn.ModuleDict({"mlp": model[:4]})) == {"mlp.0": "colwise", "mlp.3": "rowwise"}


def test_what_cannot_be_shared_is_said() -> None:
    with pytest.raises(JobFileError, match="tp finds no layers to divide") as found:
        cut.tp_plan(task(), Two(), 2)
    assert "define tp_plan(model)" in str(found.value)
    for plan, told in (
        ({"c": "colwise"}, "tp_plan\\(\\) names 'c'"),
        ({"a": "columns"}, "tp_plan\\(\\) says 'columns' for a"),
        ({"b": "colwise"}, "cannot divide b over 3 ranks: it has 2 outputs"),
        ({"b": "rowwise"}, "cannot divide b over 3 ranks: it has 4 inputs"),
    ):
        with pytest.raises(JobFileError, match=told):
            cut.tp_plan(task(tp_plan=lambda model, plan=plan: plan), Two(), 3)


def test_activations_computed_again_give_the_same_gradients() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), torch.randn(3, 4)
    found = []
    for again in (False, True):
        if again:
            cut.recompute(model, ["0", "1"])
        torch.manual_seed(0)
        model.zero_grad()
        model(x).sum().backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
