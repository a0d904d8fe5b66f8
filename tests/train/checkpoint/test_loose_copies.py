"""What a forward pass may change of a step, and what else must be as it was."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hpcddp.train.checkpoint.loose_copies import LooseCopies
from hpcddp.train.parallel import state_dict


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.register_buffer("mask", torch.full((2,), -float("inf")))


def made(beside: bool = False) -> tuple[Model, AveragedModel, LooseCopies, Callable[[], bool]]:
    model = Model()
    average = AveragedModel(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    loose = LooseCopies(model, average if beside else None, optimizer, divided=False)
    loose.take()

    def sound() -> bool:
        parts = loose.parts(optimizer, state_dict.alone, loose.copies)
        return loose.known(parts) and loose.same() and loose.finite(parts)

    return model, average, loose, sound


def test_a_forward_pass_changes_buffers_and_no_copy_of_them() -> None:
    model, _, loose, sound = made()
    before = model[1].running_mean.clone()
    model(torch.ones(2, 4))
    model[1].running_mean = torch.ones(4)
    optimizer = torch.optim.SGD(model.parameters())
    kept = loose.parts(optimizer, state_dict.alone, loose.copies).loose["model.1.running_mean"]
    assert torch.equal(kept, before) and sound()


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda model: model(torch.ones(2, 4)), True),
        (lambda model: setattr(model[1], "running_mean", torch.ones(4)), True),
        (lambda model: model.eval()(torch.ones(2, 4)), False),
    ],
    ids=["a pass", "another one", "an evaluation"],
)
def test_a_change_of_buffers_within_a_step_is_seen(
    change: Callable[[Model], object], seen: bool
) -> None:
    """They are then no longer the same on all ranks."""
    model, _, loose, _ = made()
    assert loose.as_noted()  # nothing is noted
    loose.note()
    change(model)
    assert loose.as_noted() is not seen


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model[0].weight.data.copy_(torch.ones(4, 4)),
        lambda model: setattr(model[0].weight, "data", torch.ones(4, 4)),
        lambda model: torch.nn.init.zeros_(model[0].weight),
        lambda model: model.register_buffer("late", torch.ones(1)),
    ],
    ids=["copied in", "in place of them", "changed", "a new buffer"],
)
def test_what_a_script_has_put_into_the_model_is_seen(change: Callable[[Model], None]) -> None:
    model, _, _, sound = made()
    assert sound()
    change(model)
    assert not sound()


def test_a_parameter_without_memory_is_not_read() -> None:
    """Programs that divide a model free its memory between two passes."""
    model, _, loose, _ = made()
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        loose.take()
    scalar = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([scalar])
    loose = LooseCopies(nn.ParameterList([scalar]), None, optimizer, divided=False)
    scalar.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        loose.take()


def test_numbers_that_are_not_finite_are_seen() -> None:
    model, _, loose, sound = made()
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    loose.take()
    assert not sound()


def test_an_average_that_has_moved_on_is_seen() -> None:
    model, average, loose, sound = made(beside=True)
    assert sound()
    average.update_parameters(model)
    assert not sound()
    loose.take()
    assert sound()


def test_a_part_that_a_model_has_twice_is_known_by_both_names() -> None:
    norm = nn.BatchNorm1d(4)
    twice = nn.Sequential(norm, norm)
    loose = LooseCopies(twice, None, torch.optim.SGD(twice.parameters()), divided=False)
    loose.take()
    assert {"model.0.running_mean", "model.1.running_mean"} <= loose.copies.keys()


def test_a_model_that_saves_something_else_is_left_alone() -> None:
    class Own(nn.Linear):
        def _save_to_state_dict(self, to: dict[str, Tensor], prefix: str, keep: bool) -> None:
            super()._save_to_state_dict(to, prefix, keep)
            to[f"{prefix}weight.scale"] = torch.ones(1)

    own = Own(2, 2)
    with pytest.raises(KeyError):
        LooseCopies(own, None, torch.optim.SGD(own.parameters()), divided=False)
    model, _, loose, _ = made()
    model[1].running_mean = None
    with pytest.raises(KeyError):
        loose.take()


@pytest.mark.parametrize("moves", [False, True])
def test_parameters_that_the_optimizer_does_not_change_may_change_all_the_same(
    moves: bool,
) -> None:
    """As those of a teacher, the average of a student; frozen ones do not."""
    both = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    student, teacher = both
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    loose = LooseCopies(both, None, optimizer, divided=False)
    student(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if moves:
        teacher.weight.data.lerp_(student.weight.data, 0.1)
    loose.take()
    assert loose.untouched(Tensor.item) is not moves
