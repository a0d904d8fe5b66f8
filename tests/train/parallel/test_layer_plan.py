"""Which layers tp divides, and the message where it cannot."""

import pytest
from cut_task import Two, task
from torch import nn

from hpcddp.errors import JobFileError
from hpcddp.train.parallel import layer_plan


def test_a_tied_layer_is_not_divided() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 4), "head": nn.Linear(4, 4)})
    model["head"].weight = model["embed"].weight
    plan = {"head": "colwise"}
    with pytest.raises(JobFileError, match=r"divide head: embed\.weight is the same parameter"):
        layer_plan.tp_plan(task(tp_plan=lambda model: plan), model, 2)


def test_two_layers_with_a_function_between_them_are_shared() -> None:
    model = nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 4),
        nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2),
    )  # fmt: skip
    assert layer_plan.pairs(model) == {"0": "colwise", "3": "rowwise"}
    assert layer_plan.pairs(nn.ModuleDict({"mlp": model[:4]})) == {
        "mlp.0": "colwise",
        "mlp.3": "rowwise",
    }


def test_what_cannot_be_shared_is_said() -> None:
    with pytest.raises(JobFileError, match="tp finds no layers to divide") as caught:
        layer_plan.tp_plan(task(), Two(), 2)
    assert "define tp_plan(model)" in str(caught.value)
    for plan, message in (
        ({"c": "colwise"}, "tp_plan\\(\\) names 'c'"),
        ({"a": "columns"}, "tp_plan\\(\\) has an unknown style for a: 'columns'"),
        ({"b": "colwise"}, "cannot divide b over 3 ranks: it has 2 outputs"),
        ({"b": "rowwise"}, "cannot divide b over 3 ranks: it has 4 inputs"),
    ):
        with pytest.raises(JobFileError, match=message):
            layer_plan.tp_plan(task(tp_plan=lambda model, plan=plan: plan), Two(), 3)


def test_a_layer_that_is_used_twice_is_not_divided() -> None:
    norm, act, first, second = nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 4)
    assert layer_plan.pairs(nn.Sequential(first, norm, second)) == {}
    assert layer_plan.pairs(nn.Sequential(norm, first, norm, second)) == {}
    assert layer_plan.pairs(nn.Sequential(first, act, second, act, first)) == {}
