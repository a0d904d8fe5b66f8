"""How gradients travel: what a hook changes, what it may not change, and what survives a stop."""

from pathlib import Path

import pytest
import torch
from ranks import records, train_all
from sites import record_run
from torch.distributed import HashStore

from hpcddp import spec
from hpcddp.errors import JobFileError
from hpcddp.rundir import RunDir, read_lines
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import checkpoint, dcp_files
from hpcddp.train.parallel import hooks
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World

# One worker, one group of ranks for all, which the first test waits for.
pytestmark = [pytest.mark.xdist_group("hooks"), pytest.mark.timeout(900)]

SIZE = 2
STEPS = 20
# Each rank notes its weights before each pass, and how many samples go through.
TASK = """
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

class Notes(nn.Sequential):
    def forward(self, x):
        if self.training:
            self.seen += len(x)
            self.calls += 1
            x = x * (torch.nan if self.calls == self.bad else 1)
            line = {"size": len(x), "weight": self[0].weight.sum().item()}
            with Path(f"{self.path}-{dist.get_rank()}").open("a") as file:
                file.write(json.dumps(line) + "\\n")
        return super().forward(x)

def model(path, norm=False, dropout=0.0, bad=0):
    first = nn.Linear(16, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.Tanh()
    made = Notes(*first, nn.Dropout(dropout), nn.Linear(32, 4))
    made.path, made.calls, made.bad = path, 0, bad
    made.register_buffer("seen", torch.zeros(()))
    return made

def dataset(split, size=80):
    if split == "eval":
        return None
    x = torch.randn(size, 16, generator=torch.Generator().manual_seed(len(split)))
    return TensorDataset(x, x[:, :4].argmax(1))

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
POWERSGD = {"ddp__hook": "powersgd", "ddp__rank": 2, "ddp__after": 3}
LOCAL = {"ddp__hook": "local_sgd", "ddp__after": 3, "ddp__period": 2, "nodes": 2}


# An epoch's last step has 1 sample, or 5, of which rank 0 has 2 and then 1, and rank 1 has 2.
UNEVEN = {
    "of one": {"dataset__size": 33},
    "of five": {"dataset__size": 37, "train__micro_batch": 2},
}
EPOCHS = {"train__drop_last": False, "epochs": 2, "max_steps": 0}
JOINED = {**EPOCHS, "ddp__join": True, "dataset__size": 33}


def make(folder: Path, *, nodes: int = 1, **keys: object) -> RunDir:
    """A run of two ranks, on one node or two. Keys are the job's, with `__` for the dot."""
    run = RunDir(folder)
    run.attempts.mkdir(parents=True)
    source = folder / "noting_task.py"
    source.write_text(TASK)
    values = {"task": str(source), "model.path": str(folder / "notes"), "global_batch": 8,
              "max_steps": STEPS, "train.log_every": 1, "train.schedule": "constant",
              "train.lr": 1e-2, "train.eval_every": 0, "checkpoint.best": "",
              "checkpoint.every": 0}  # fmt: skip
    values |= {name.replace("__", "."): value for name, value in keys.items()}
    job = spec.to_dict(spec.KEYS.build(values))
    return record_run(run, (nodes, nodes), SIZE // nodes, "local", spec=job, workdir=str(folder))


def losses(run: RunDir) -> list[float]:
    """By step, over all attempts."""
    attempts = range(1, 1 + len(list(run.attempts.iterdir())))
    found = {r["step"]: r["loss"] for n in attempts for r in records(run, "train", n)}
    return [found[step] for step in sorted(found)]


def state(run: RunDir) -> dict[str, torch.Tensor]:
    """Everything in the newest checkpoint."""
    return dcp_files.read_all(checkpoint.complete(run.checkpoints)[0])


def notes(run: RunDir, rank: int) -> list[dict[str, float]]:
    return read_lines(run.path / f"notes-{rank}")


# Against plain averages: the hooks' keys, and how near their losses are.
LOSSY = {
    "fp16": ({"ddp__hook": "fp16"}, 1e-3),
    "bf16": ({"ddp__hook": "bf16"}, 1e-2),
    "powersgd": (POWERSGD, 0.1),
    "accumulated": ({**POWERSGD, "train__micro_batch": 2}, 0.1),
    "local": (LOCAL, 0.1),
    "scaled": ({"ddp__hook": "fp16", "train__precision": "fp16"}, 1e-2),
}


STOP = 7  # the last step of a first life
# Trained in one life and in two. A local one is as after a save.
RESUMED = {"powersgd": POWERSGD, "local_sgd": {**LOCAL, "checkpoint__every": STOP}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One group of ranks for all of it."""
    folder = tmp_path_factory.mktemp("hooks")
    asked = {"none": {}} | {name: keys for name, (keys, _) in LOSSY.items()}
    for name, keys in RESUMED.items():
        keys = {**keys, "model__dropout": 0.2, "model__norm": True}
        asked |= {f"{name} whole": keys, f"{name} first": {**keys, "max_steps": STOP}}
        asked |= {f"{name} second": keys}
    for name, keys in UNEVEN.items():
        keys = {**keys, **EPOCHS, "train__precision": "fp64"}
        asked |= {f"padded {name}": keys, f"joined {name}": {**keys, "ddp__join": True}}
    asked |= {"joined zero1": {**JOINED, "train__precision": "fp64", "strategy": "zero1"}}
    asked |= {"joined half": {**JOINED, "train__precision": "fp16", "ddp__hook": "fp16"}}
    asked |= {"joined powersgd": {**JOINED, **POWERSGD}}
    asked["skipped"] = {**POWERSGD, "train__on_divergence": "skip", "model__bad": 9}
    runs = {name: make(folder / name, **keys) for name, keys in asked.items()}
    for name in RESUMED:
        first, second = runs[f"{name} first"].checkpoints, runs[f"{name} second"].checkpoints
        first.mkdir(exist_ok=True)
        second.symlink_to(first)
    train_all(folder, SIZE, [(run, 1, 0, "") for run in runs.values()])
    return runs


@pytest.mark.parametrize("name", LOSSY)
def test_a_hook_costs_little_of_the_loss(trained, name):
    plain, ours = losses(trained["none"]), losses(trained[name])
    assert len(ours) == STEPS and ours != plain
    assert plain[-1] < 0.8 * plain[0]
    assert ours == pytest.approx(plain, rel=LOSSY[name][1])


def test_half_as_many_numbers_in_micro_batches_make_no_difference(trained):
    ours, whole = losses(trained["accumulated"]), losses(trained["powersgd"])
    assert ours == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_goes_on_to_the_last_bit(trained, name):
    whole, first, second = (trained[f"{name} {part}"] for part in ("whole", "first", "second"))
    assert records(second, "start")[0]["step"] == STOP
    assert losses(first) + losses(second) == losses(whole)
    one, two = state(whole), state(second)
    assert one.keys() == two.keys()
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def test_powersgds_memory_is_of_each_rank(trained):
    saved = state(trained["powersgd"])
    mine, other = saved["hook.0.0.error"], saved["hook.1.0.error"]
    assert len(mine) == 16 * 32 + 32 + 32 * 4 + 4
    assert mine.abs().sum() > 0 and not torch.equal(mine, other)
    assert torch.equal(saved["hook.0.0.q"], saved["hook.1.0.q"])
    assert not any(name.startswith("hook") for name in state(trained["none"]))


def test_powersgd_remembers_nothing_of_a_step_that_was_left_out(trained):
    """Or the gradients of all later ones would be no numbers either."""
    assert [r["step"] for r in records(trained["skipped"], "skipped")] == [9]
    assert losses(trained["skipped"])[-1] == pytest.approx(losses(trained["none"])[-1], rel=0.3)


def test_powersgd_is_refused_where_it_would_wait_for_a_gpu_that_it_has_not(monkeypatch):
    world = World(Rank(0, 2, 0, 2, 0), torch.device("cpu"), "gloo", [], HashStore())
    job = spec.KEYS.build({"ddp.hook": "powersgd"})
    hooks.Hook(job, replicas(world))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(JobFileError, match="for ranks on the CPU"):
        hooks.Hook(job, replicas(world))


def test_sparse_gradients_are_refused():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True))
    with pytest.raises(JobFileError, match="the sparse gradient of 0") as caught:
        hooks.check_dense(model, "ddp.join")
    assert caught.value.where == "ddp.join"


def test_local_ranks_differ_between_two_averages_and_in_no_save(trained):
    """Steps 4, 6, 8, ... are taken alone, and after 5, 7, 9, ... all average."""
    one, two = ([line["weight"] for line in notes(trained["local"], rank)] for rank in range(SIZE))
    before = [step for step, (a, b) in enumerate(zip(one, two, strict=True), 1) if a == b]
    assert before == [1, 2, 3, 4, *range(6, STEPS + 1, 2)]


@pytest.mark.parametrize("name", UNEVEN)
def test_no_padding_makes_no_difference(trained, name):
    padded, joined = trained[f"padded {name}"], trained[f"joined {name}"]
    assert losses(joined) == pytest.approx(losses(padded), rel=1e-12)
    one, two = state(padded), state(joined)
    assert one.keys() == two.keys()
    for full, value in one.items():
        torch.testing.assert_close(two[full], value, rtol=1e-12, atol=1e-12, msg=full)
    computed = [
        [sum(line["size"] for line in notes(run, rank)) for rank in range(SIZE)]
        for run in (padded, joined)
    ]
    size = UNEVEN[name]["dataset__size"]
    assert sum(computed[1]) == 2 * size
    assert computed[0] == [size + 1, size + 1]  # over two epochs


def test_ranks_without_samples_go_with_what_divides_or_shortens(trained):
    whole = losses(trained["padded of one"])
    assert losses(trained["joined zero1"]) == pytest.approx(whole, rel=1e-12)
    assert losses(trained["joined half"]) == pytest.approx(whole, rel=0.1)
    assert losses(trained["joined powersgd"]) == pytest.approx(whole, rel=0.2)
    for name in ("joined half", "joined powersgd"):
        assert [line["size"] for line in notes(trained[name], 1)] == [4] * 8
        assert [line["size"] for line in notes(trained[name], 0)] == [4, 4, 4, 4, 1] * 2
