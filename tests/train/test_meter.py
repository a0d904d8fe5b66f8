"""What a training record tells of the steps before it."""

import pytest
import torch
from torch.distributed import HashStore

from hpcddp.topology import Rank
from hpcddp.train import meter as meters
from hpcddp.train.meter import Meter
from hpcddp.train.rank.world import World

GOOD = torch.zeros(())


@pytest.fixture
def meter():
    return Meter(World(Rank(0, 1, 0, 1, 0), torch.device("cpu"), "gloo", [], HashStore()))


def told(meter):
    meter.add_up(GOOD)
    return meter.read()[0]


def test_the_loss_is_a_mean_over_samples_since_the_last_record(meter):
    meter.add(torch.tensor(1.0), 3)
    meter.add(torch.tensor(5.0), 1)
    meter.step(0.1, None)
    assert told(meter)["loss"] == 2
    meter.add(torch.tensor(7.0, dtype=torch.float64), 4)
    meter.step(0.2, torch.tensor(0.5))
    values = told(meter)
    assert (values["loss"], values["lr"], values["grad_norm"]) == (7, 0.2, 0.5)


def test_a_record_on_its_way_is_of_the_steps_before_it(meter):
    meter.add(torch.tensor(1.0), 2)
    meter.step(0.1, None)
    meter.add_up(GOOD)
    meter.add(torch.tensor(9.0), 2)
    meter.step(0.2, None)
    values, _ = meter.read()
    assert (values["loss"], values["lr"]) == (1, 0.1)
    assert told(meter)["loss"] == 9


def test_a_step_left_out_counts_nowhere_but_in_the_time(meter):
    meter.add(torch.tensor(1.0), 2)
    meter.step(0.1, None)
    meter.mark()
    meter.add(torch.tensor(torch.nan), 2)
    meter.drop()
    assert told(meter)["loss"] == 1
    meter.mark()
    meter.add(torch.tensor(torch.nan), 2)
    meter.drop()
    assert not told(meter)


def test_rare_records_keep_few_losses(meter, monkeypatch):
    monkeypatch.setattr(meters, "KEPT", 4)
    for loss in range(11):
        meter.add(torch.tensor(float(loss)), 1 + loss % 2)
        meter.step(0.1, None)
        assert len(meter._losses) <= 5
    weights = [1 + loss % 2 for loss in range(11)]
    mean = sum(n * w for n, w in enumerate(weights)) / sum(weights)
    assert told(meter)["loss"] == pytest.approx(mean)


def test_steps_without_a_loss_count_in_speed_and_not_in_the_loss(meter):
    for loss in (None, torch.tensor(3.0), None, None):
        meter.add(loss, 2)
        meter.step(0.1, None)
    values = told(meter)
    assert (values["loss"], values["lr"]) == (3, 0.1)
    assert values["samples_per_s"] * values["step_s"] == pytest.approx(2)
    meter.add(None, 5)
    meter.step(0.1, None)
    values = told(meter)
    assert "loss" not in values and not meter.first
    assert values["samples_per_s"] * values["step_s"] == pytest.approx(5)
