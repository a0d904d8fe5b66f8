"""Numbers that went wrong, by a bad sample: it comes to one rank, in one step."""

import json
import math
import sys

import pytest
import torch
from ranks import Ranks, make_run, one_rank, records
from torch import nn
from torch.distributed import HashStore

from hpcddp.errors import Diverged
from hpcddp.spec import TrainSpec
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import checkpoint, dcp_files
from hpcddp.train.divergence import KEPT, DivergenceDetector, Finding
from hpcddp.train.input.sampler import ResumableSampler
from hpcddp.train.meter import Meter
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World

# Each sample carries a factor of its loss; a bad one may also spoil what BatchNorm counts.
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(norm=False):
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(8))
    return nn.Sequential(*layers).double()

def dataset(split, bad=(), value="1", spoil=False, size=48):
    if split != "train":
        return None
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    factor = torch.ones(size, dtype=torch.float64)
    y = x.sum(1)
    factor[list(bad)] = float(value)
    if spoil:
        x[list(bad)] = float("nan")
    return TensorDataset(x, torch.stack((y, factor), 1))

def loss(output, target):
    return (target[:, 1] * (output[:, 0] - target[:, 0]) ** 2).mean()
"""
BATCH, STEP, RANK = 8, 4, 1
ORDER = list(ResumableSampler(range(48), 1, 0))
BAD = ORDER[(STEP - 1) * BATCH + 4 + RANK]  # comes in step 4, to rank 1 of 2


def make(folder, value="nan", **keys):
    job = {"global_batch": BATCH, "epochs": 1, "max_steps": 0, "train__log_every": 100}
    job |= {"train__schedule": "constant", "dataset__bad": [BAD], "dataset__value": value}
    return make_run(folder, TASK, **(job | keys))


def saved(run):
    return [p.name for p in checkpoint.complete(run.checkpoints)]


def test_a_bad_loss_on_one_rank_stops_all_and_is_never_saved(tmp_path):
    run = make(tmp_path, gpus=2, checkpoint__every=1, checkpoint__keep=9)
    with Ranks.of(run, 2) as ranks:
        ends = ranks.wait()
    assert [code for code, _, _ in ends] == [87, 87]
    assert saved(run) == ["step-3", "step-2", "step-1"]
    told = json.loads(run.attempt(1).error.read_text())
    assert (told["type"], told["kind"], told["step"], told["rank"], told["loss"]) == (
        "Diverged", "diverged", STEP, RANK, "nan",
    )  # fmt: skip
    (record,) = records(run, "diverged")
    assert (record["step"], record["rank"], record["loss"]) == (STEP, RANK, "nan")
    assert records(run, "end") == [] and "Traceback" not in "".join(err for _, _, err in ends)


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        ("inf", {"checkpoint__every": 1}),
        ("1e9", {"train__log_every": 1}),
        ("-1e9", {"max_steps": 10**6, "epochs": 0, "checkpoint__every": 0}),  # seen by the vote
    ],
)
def test_infinite_and_exploded_losses_are_found_with_their_step(tmp_path, value, keys):
    run = make(tmp_path, value, checkpoint__keep=9, **keys)
    with pytest.raises(Diverged, match=r"train\.on_divergence") as caught:
        one_rank(run)
    assert (caught.value.facts["step"], caught.value.facts["what"]) == (STEP, "loss")
    assert all(name <= "step-3" for name in saved(run))


def by_hand(task, skipped):
    """The weights after an epoch in which a step was left out."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    inputs, targets = task.dataset("train").tensors
    for step in range(1, 7):
        batch = ORDER[(step - 1) * BATCH : step * BATCH]
        if step != skipped:
            optimizer.zero_grad()
            task.loss(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_without_the_bad_step_the_training_is_the_one_that_never_had_it(tmp_path, policy):
    workers = int(policy == "rollback")  # the samples that they have fetched are not the next ones
    job = {"train__on_divergence": policy, "checkpoint__every": 2, "data__workers": workers}
    run = make(tmp_path / "2", gpus=2, **job)
    with Ranks.of(run, 2) as ranks:
        assert [(code, err) for code, _, err in ranks.wait()] == [(0, ""), (0, "")]
    (skipped,) = records(run, "skipped")
    assert (skipped["step"], skipped["rank"]) == (STEP, RANK)
    back = [(r["step"], r["to"], r["path"]) for r in records(run, "rollback")]
    assert back == ([(STEP, 2, "checkpoints/step-2")] if policy == "rollback" else [])
    assert all(math.isfinite(r["loss"]) for r in records(run, "train"))
    one_rank(make(tmp_path / "1", "1", max_steps=1))  # imports the task
    weights = dcp_files.read_all(checkpoint.complete(run.checkpoints)[0], "model.")
    for name, value in by_hand(sys.modules["small_task"], STEP).items():
        torch.testing.assert_close(weights[f"model.{name}"], value, rtol=1e-9, atol=1e-12)
    assert saved(run)[0] == "step-6"


def test_checkpoints_that_a_rollback_passed_over_push_no_good_one_out(tmp_path):
    """Those of steps 2 and 3 are damaged just before it: it goes back to 1, and saves 2 anew."""
    run = make(tmp_path, train__on_divergence="rollback", checkpoint__every=1, checkpoint__keep=3)
    told = []

    def events(record):
        told.append(record["event"])
        if record["event"] == "checkpoint" and record["step"] == 3 and "rollback" not in told:
            for name in ("step-2", "step-3"):
                shard = run.checkpoints / name / "__0_0.distcp"
                shard.write_bytes(bytes(shard.stat().st_size))
        if record["event"] == "checkpoint" and record["step"] == 2 and "rollback" in told:
            told.append(saved(run))

    one_rank(run, on_record=events)
    assert [r["to"] for r in records(run, "rollback")] == [1]
    assert ["step-3", "step-2", "step-1"] in told  # the first is a damaged one


def test_a_step_left_out_is_not_counted_by_batchnorm(tmp_path):
    run = make(tmp_path, "1", train__on_divergence="skip", model__norm=True, dataset__spoil=True)
    one_rank(run)
    last = dcp_files.read_all(checkpoint.complete(run.checkpoints)[0], "model.")
    assert all(tensor.isfinite().all() for tensor in last.values())
    assert last["model.1.num_batches_tracked"] == 5


def test_a_long_row_of_bad_steps_ends_the_training(tmp_path):
    run = make(tmp_path, train__on_divergence="skip", dataset__bad=list(range(48)), global_batch=4)
    with pytest.raises(Diverged, match="at step 11, and 11 steps in a row were bad"):
        one_rank(run)
    assert len(records(run, "skipped")) == 10 and saved(run) == []


def test_there_is_nothing_to_go_back_to_without_a_checkpoint(tmp_path):
    run = make(tmp_path, train__on_divergence="rollback", checkpoint__every=0)
    with pytest.raises(Diverged, match="no checkpoint to roll back to"):
        one_rank(run)
    assert saved(run) == []


BAD_GRADIENT = """
_loss = loss
def loss(output, target):  # the square root's slope at 0 is infinite
    return _loss(output, target) + (0 * output).abs().sqrt().sum()
"""


def test_a_bad_gradient_is_found_before_the_weights_are_saved(tmp_path):
    run = make(tmp_path, "1", extra=BAD_GRADIENT, checkpoint__every=1)
    with pytest.raises(Diverged) as caught:
        one_rank(run)
    assert (caught.value.facts["step"], caught.value.facts["what"]) == (1, "weights")
    assert caught.value.what == "the weights of rank 0 are not finite at step 1"
    assert saved(run) == []


def test_a_scaler_that_looks_for_its_scale_is_no_divergence(tmp_path):
    """Losses of 1e35 times the first scale of 65536 are infinite; the losses are not."""
    scaled = "\n_loss = loss\ndef loss(output, target):\n    return 1e35 * _loss(output, target)\n"
    keys = {"train__precision": "fp16", "train__on_divergence": "skip", "train__explode": 0.0}
    run = make(tmp_path, "1", extra=scaled, **keys)
    source = tmp_path / "small_task.py"
    text = source.read_text().replace(".double()", "").replace("torch.float64", "torch.float32")
    source.write_text(text)
    assert one_rank(run) == "done"
    assert records(run, "skipped") == [] and records(run, "train")


def detector_of(**keys):
    world = World(Rank(0, 1, 0, 1, 0), torch.device("cpu"), "gloo", [], HashStore())
    return DivergenceDetector(replicas(world), TrainSpec(**keys), nn.Linear(2, 2), Meter(world))


@pytest.mark.parametrize(
    ("first", "losses", "bad"),
    [
        (5.0, [1e-12, 4.0, 1e-9, 20.0], False),  # near 0, and wobbles
        (1e-6, [0.5], False),  # a first loss below 1 counts as 1
        (5.0, [4999.0], False),
        (5.0, [5001.0], True),
        (-5.0, [-4999.0, 1e-3], False),
        (-5.0, [-5001.0], True),
        (0.0, [999.0], False),
        (math.inf, [1e30], False),  # nothing to compare with
    ],
)
def test_what_counts_as_exploded(first, losses, bad):
    detector = detector_of()
    detector.refer_to(first)
    for step, loss in enumerate(losses):
        detector.add(torch.tensor(loss), step)
    assert detector.bad() is bad
    never = detector_of(explode=0.0)
    never.refer_to(first)
    never.add(torch.tensor(losses[-1]), 1)
    assert not never.bad()


def test_the_measure_of_an_explosion_survives_a_restart(tmp_path):
    run = make(tmp_path, "1", train__log_every=1)
    one_rank(run, max_steps=2)
    first = records(run, "train")[0]["loss"]
    meta = json.loads((run.checkpoints / "step-2" / "meta.json").read_text())
    assert meta["first_loss"] == first
    one_rank(run, 2)
    meta = json.loads((run.checkpoints / "step-6" / "meta.json").read_text())
    assert meta["first_loss"] == first


def test_losses_that_nobody_looks_at_are_not_forgotten():
    detector = detector_of()
    detector.add(torch.tensor(math.nan), 1)
    for step in range(3 * KEPT):
        detector.add(torch.tensor(1.0), step)
    assert detector.bad()


def test_three_rollbacks_to_one_checkpoint_are_enough(tmp_path):
    detector, found = detector_of(on_divergence="rollback"), Finding(9, 0, math.nan, "loss")
    for _ in range(3):
        assert detector.go_back(found, tmp_path / "step-5") == tmp_path / "step-5"
    detector.go_back(found, tmp_path / "step-7")
    with pytest.raises(Diverged, match="after 3 rollbacks to step-5"):
        detector.go_back(found, tmp_path / "step-5")
