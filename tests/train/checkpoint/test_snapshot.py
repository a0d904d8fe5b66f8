"""Training state to a checkpoint and back, in one process: what comes back, and what does not."""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore
from torch.optim.lr_scheduler import LambdaLR, StepLR

from hpcddp.errors import CheckpointError
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import checkpoint, snapshot
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.checkpoint.saver import Saver
from hpcddp.train.checkpoint.snapshot import Live, Position
from hpcddp.train.rank.spread import Spread, replicas
from hpcddp.train.rank.world import World

AT = Position(step=7, epoch=2, samples_consumed=24)


@pytest.fixture
def spread() -> Iterator[Spread]:
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield replicas(World(Rank(0, 1, 0, 1, 0), torch.device("cpu"), "gloo", [], store))
    dist.destroy_process_group()


def live(schedule, width: int = 4, lr: float = 0.1) -> Live:
    """A model after one step, so that its optimizer has a state."""
    torch.manual_seed(width)
    module = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    return Live(module, optimizer, schedule(optimizer), torch.amp.GradScaler("cpu", enabled=False))


def step(made: Live) -> Live:
    made.module(torch.rand(5, 3)).square().sum().backward()
    made.optimizer.step()
    made.scheduler.step()
    made.optimizer.zero_grad()
    return made


def ours(optimizer):
    return LambdaLR(optimizer, lambda n: 0.5**n)


def own(optimizer):
    return StepLR(optimizer, 1, gamma=0.5)


def save(folder: Path, spread: Spread, made: Live) -> Path:
    run = RunDir(folder)
    for path in (run.checkpoints, run.attempt(1).path):
        path.mkdir(parents=True)
    run.job.write_text("{}")
    lease = Lease(run, 1)
    lease.take(spread.world)
    saver = Saver(lease, spread, made, lambda *_, **__: None, 2, None, DiskRetry(spread.world))
    assert saver.finish(AT, {"best": {}})
    return checkpoint.complete(run.checkpoints)[0]


def restore(folder: Path, spread: Spread, made: Live, **own: bool) -> None:
    meta = checkpoint.read_meta(folder)
    assert snapshot.position(meta, folder) == AT
    snapshot.restore(folder, meta, spread, made, DiskRetry(spread.world), **own)


def state(made: Live) -> dict[str, torch.Tensor]:
    moments = made.optimizer.state_dict()["state"]
    return {
        **made.module.state_dict(),
        **{f"moment {n}": entry["momentum_buffer"] for n, entry in moments.items()},
    }


def test_weights_buffers_moments_and_random_numbers_come_back(tmp_path: Path, spread: Spread):
    saved = step(live(ours))
    there = copy.deepcopy(state(saved))
    folder = save(tmp_path, spread, saved)
    drawn = torch.rand(3)
    other = step(step(live(ours)))
    restore(folder, spread, other)
    assert torch.equal(torch.rand(3), drawn)
    assert there.keys() == state(other).keys()
    assert all(torch.equal(there[name], value) for name, value in state(other).items())


@pytest.mark.parametrize(
    ("schedule", "words", "lr"),
    [
        (ours, {}, 0.4 * 0.5**7),  # follows from the job file and the step
        (own, {"optimizer": True, "schedule": True}, 0.1 * 0.5),  # a person's own: as it was
        (own, {"optimizer": True}, 0.1 * 0.5),
    ],
)
def test_a_learning_rate_of_ones_own_comes_back_and_ours_follows_from_the_job(
    tmp_path: Path, spread: Spread, schedule, words, lr
):
    folder = save(tmp_path, spread, step(live(schedule)))
    changed = live(schedule, lr=0.4)
    restore(folder, spread, changed, **words)
    assert changed.optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_what_else_has_a_state_comes_back(tmp_path: Path, spread: Spread):
    saved, other = step(live(ours)), live(ours)
    saved.more, other.more = nn.Linear(2, 2), nn.Linear(2, 2)
    folder = save(tmp_path, spread, saved)
    restore(folder, spread, other)
    assert torch.equal(saved.more.weight, other.more.weight)


def test_another_model_is_refused_and_stays_as_it_is(tmp_path: Path, spread: Spread):
    folder = save(tmp_path, spread, step(live(ours)))
    other = live(ours, width=5)
    before = copy.deepcopy(other.module.state_dict())
    with pytest.raises(
        CheckpointError, match=r"0\.weight is \[4, 3\] in the checkpoint and \[5, 3\] in the model"
    ):
        restore(folder, spread, other)
    assert all(torch.equal(before[n], value) for n, value in other.module.state_dict().items())


@pytest.mark.parametrize("meta", [{}, {"step": "x", "epoch": 0, "samples_consumed": 0}])
def test_a_checkpoint_that_says_no_position_is_refused(tmp_path: Path, meta: dict[str, object]):
    with pytest.raises(CheckpointError, match=r"meta\.json has no step"):
        snapshot.position(meta, tmp_path)


def test_meta_says_who_wrote_it(tmp_path: Path, spread: Spread):
    run = RunDir(tmp_path / "digits-1")
    lease = SimpleNamespace(run=run, attempt=3)
    facts = snapshot.meta(lease, spread, step(live(ours)), AT, {"best": {"step": 5}})
    assert facts["run"] == "digits-1" and facts["attempt"] == 3
    assert (facts["step"], facts["epoch"], facts["samples_consumed"]) == (7, 2, 24)
    assert facts["best"] == {"step": 5} and facts["world"] == 1 and facts["strategy"] == "single"
