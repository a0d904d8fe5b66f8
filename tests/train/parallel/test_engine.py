"""However the ranks spread a model: the same losses, weights and checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import one_rank, records, train_all
from sites import CHECKOUT, record_run

from hpcddp import spec
from hpcddp.rundir import RunDir, read_lines
from hpcddp.train.checkpoint import checkpoint, dcp_files, plainfile

SIZE = 4
# A GPT of four blocks, in float64: what differs is no rounding.
KEYS = {
    "task": str(CHECKOUT / "jobs/charlm.py"),
    "global_batch": 8,
    "max_steps": 6,
    "model.layers": 4,
    "model.width": 16,
    "model.heads": 4,
    "model.context": 16,
    "dataset.context": 16,
    "train.precision": "fp64",
    "train.clip_norm": 0.5,
    "train.lr": 1e-2,
    "train.warmup_steps": 2,
    "train.log_every": 1,
    "train.trace": True,
    "data.eval_batch": 100,
    "checkpoint.best": "",
}
LAYOUTS = [
    ("ddp", {}),
    ("zero1", {}),
    ("fsdp", {}),
    ("hsdp=2", {}),
    ("tp", {}),
    ("pp", {"pp.schedule": "1f1b"}),
    ("pp=2,ddp=2", {"pp.schedule": "interleaved"}),
    ("pp=2,tp=2", {}),
    ("fsdp=2,tp=2", {}),
    # Two micro-batches, and activations computed again.
    ("fsdp", {"train.micro_batch": 1, "train.recompute": True}),
]
# What --full adds: each part of these is in one of those above.
MORE_LAYOUTS = [
    ("pp", {"pp.schedule": "gpipe", "pp.chunks": 8}),
    ("pp=2,fsdp=2", {}),
    ("pp=2,zero1=2", {}),
    ("ddp=2,tp=2", {}),
    ("ddp", {"train.micro_batch": 1, "train.recompute": True}),
    ("pp=2,ddp=2", {"train.recompute": True}),
]
COMPILED = ["pp=2,fsdp=2"]
ALL_COMPILED = ["ddp", "zero1", "tp", "pp", "fsdp=2,tp=2", "pp=2,tp=2"]
# As exact as their numbers are.
MIXED = [
    ("fsdp", "bf16"), ("fsdp", "fp16"), ("tp", "fp16"), ("pp=2,ddp=2", "fp16"),
    ("pp=2,tp=2", "bf16"),
]  # fmt: skip
# Micro-batches of two change its statistics one by one, in a pipeline too.
NORM = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model():
    def layers(size):
        return [nn.Linear(6, size), nn.BatchNorm1d(size), nn.ReLU()]
    return nn.Sequential(*layers(6), *layers(6), *layers(6), nn.Linear(6, 2))

def dataset(split):
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(len(split)))
    return TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
# The same, but what goes in is a dictionary, and so is what should come out.
FORMS = (
    NORM
    + """
_model, _dataset, _loss = model, dataset, loss

class Join(nn.Module):
    def forward(self, given):
        return torch.cat([given["a"], given["b"]], 1)

def model():
    return nn.Sequential(Join(), *_model())

def dataset(split):
    return [({"a": x[:2], "b": x[2:]}, {"y": y}) for x, y in _dataset(split)]

def loss(output, target):
    return _loss(output, target["y"])
"""
)
# A weight that two layers share, groups with options and rates of their own, and a schedule.
OWN = (
    NORM
    + """
def model():
    inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    made = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6), nn.Linear(6, 2))
    made[2].weight = made[0].weight
    return made

def optimizer(model, train):
    kinds = [[p for p in model.parameters() if p.ndim == n] for n in (1, 2)]
    groups = [{"params": kinds[0], "weight_decay": 0}, {"params": kinds[1]}]
    return torch.optim.AdamW(groups, lr=0.1)

def scheduler(optimizer, total_steps):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda s: 1 / (1 + s), lambda s: 0.9**s])
"""
)
# The groups that train all layouts take a minute and a half on two cores, with --full.
pytestmark = pytest.mark.timeout(900)
OWN_CHAIN = ["fsdp=2,tp=2", "ddp", "tp", "fsdp", "ddp=2,tp=2"]
# Save under one, go on under the next, two steps each.
CHAIN = ["ddp", "fsdp", "pp=2,ddp=2", "fsdp=2,tp=2", "zero1", "tp", "ddp"]


def make(folder: Path, strategy: str, gpus: int = SIZE, **more: object) -> RunDir:
    run = RunDir(folder)
    run.attempts.mkdir(parents=True)
    return asks(run, strategy, gpus, **more)


def asks(run: RunDir, strategy: str, gpus: int = SIZE, **more: object) -> RunDir:
    """Let a run's next attempt have another strategy."""
    job = spec.to_dict(spec.KEYS.build({**KEYS, **more, "strategy": strategy}))
    return record_run(run, (1, 1), gpus, "local", spec=job, workdir=str(run.path))


def losses(run: RunDir) -> list[float]:
    attempts = sorted(int(path.name) for path in run.attempts.iterdir())
    return [r["loss"] for number in attempts for r in records(run, "train", number)]


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    return dcp_files.read_all(checkpoint.complete(run.checkpoints)[0], "model.")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """One process, and nothing spread."""
    run = make(tmp_path_factory.mktemp("alone") / "run", "single", 1)
    assert one_rank(run) == "done"
    return run


@pytest.fixture(scope="module")
def layouts(pytestconfig: pytest.Config) -> list[tuple[str, dict[str, object]]]:
    return [*LAYOUTS, *(MORE_LAYOUTS if pytestconfig.getoption("--full") else [])]


@pytest.fixture(scope="module")
def spread(
    tmp_path_factory: pytest.TempPathFactory, layouts: list[tuple[str, dict[str, object]]]
) -> list[RunDir]:
    """All layouts, and last a run that changes its strategy again and again."""
    folder = tmp_path_factory.mktemp("spread")
    made = [make(folder / f"run{i}", text, **more) for i, (text, more) in enumerate(layouts)]
    chain = make(folder / "chain", "ddp", max_steps=2 * len(CHAIN))
    lives = [(chain, i + 1, 2 * (i + 1), text) for i, text in enumerate(CHAIN)]
    train_all(folder, SIZE, [*((run, 1, 0, "") for run in made), *lives])
    return [*made, chain]


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """Runs that have a one-process sibling each."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "norm.py").write_text(NORM)
    (folder / "forms.py").write_text(FORMS)
    norm = {"task": str(folder / "norm.py"), "model": {}, "dataset": {}, "train.micro_batch": 2}
    forms = {**norm, "task": str(folder / "forms.py")}
    found = {
        "dropout": make(folder / "dropout", "tp", **DROPOUT),
        "norm": make(folder / "norm", "pp", **norm),
        "norm alone": make(folder / "norm alone", "single", 1, **norm),
        "forms": make(folder / "forms", "pp", **forms),
        "norm fsdp": make(folder / "norm fsdp", "fsdp", **norm),
        "norm pp,ddp": make(folder / "norm pp", "pp=2,ddp=2", **norm),
    }
    for text, precision in MIXED:
        name = f"{text} {precision}"
        found[name] = make(folder / name, text, **{"train.precision": precision})
    (folder / "own.py").write_text(OWN)
    steps = 2 * len(OWN_CHAIN)
    own = {**norm, "task": str(folder / "own.py"), "max_steps": steps, "train.micro_batch": 0}
    run = make(folder / "own", "ddp", **own)
    lives = [(run, i + 1, 2 * (i + 1), text)
             for i, text in enumerate(OWN_CHAIN)]  # fmt: skip
    whole = [(run, 1, 0, "") for name, run in found.items() if "alone" not in name]
    train_all(folder, SIZE, [*whole, *lives])
    found |= {"own": lives[0][0], "own alone": make(folder / "own alone", "single", 1, **own)}
    one_rank(found["norm alone"])
    one_rank(found["own alone"])
    return found


DROPOUT = {"model.dropout": 0.3}


def test_however_a_model_is_spread_it_trains_the_same(
    alone: RunDir, spread: list[RunDir], layouts: list[tuple[str, dict[str, object]]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """One test, since what it looks at takes a while to make."""
    for run, (text, more) in zip(spread[:-1], layouts, strict=True):
        print(f"--- {text} {more}")
        it_trains_as_one_process(run, alone)
    for text in ("pp=2,ddp=2", "fsdp=2,tp=2"):
        run = spread[[found for found, _ in LAYOUTS].index(text)]
        all_ranks_tell_of_their_steps_and_each_sample_is_told_once(run, alone)
    it_goes_on_under_any_other_strategy(spread[-1], tmp_path / "chain")
    divided = spread[[text for text, _ in LAYOUTS].index("fsdp=2,tp=2")]
    what_was_saved_in_parts_is_exported_whole(divided, tmp_path)


def it_trains_as_one_process(run: RunDir, alone: RunDir) -> None:
    assert losses(run) == pytest.approx(losses(alone), rel=1e-9)
    (want,), (found,) = records(alone, "eval"), records(run, "eval")
    assert found["metrics"] == pytest.approx(want["metrics"], rel=1e-9)
    assert found["count"] == want["count"]
    norms = [[r["grad_norm"] for r in records(r_, "train")] for r_ in (run, alone)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    ours, theirs = weights(run), weights(alone)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-9, atol=1e-12)


def all_ranks_tell_of_their_steps_and_each_sample_is_told_once(run: RunDir, alone: RunDir) -> None:
    traces = [read_lines(run.attempt(1).trace(rank)) for rank in range(SIZE)]
    whole = read_lines(alone.attempt(1).trace(0))
    for line, *lines in zip(whole, *traces, strict=True):
        assert {told["step"] for told in lines} == {line["step"]}
        assert sorted(i for told in lines for i in told["ids"]) == sorted(line["ids"])
        assert sum(told["loss"] is None for told in lines) == 2


def it_goes_on_under_any_other_strategy(chain: RunDir, folder: Path) -> None:
    begun = [records(chain, "start", number)[0] for number in range(1, 1 + len(CHAIN))]
    assert [row["strategy"] for row in begun] == [
        "ddp=4", "fsdp=4", "pp=2,ddp=2", "fsdp=2,tp=2", "zero1=4", "tp=4", "ddp=4"
    ]  # fmt: skip
    assert [row["step"] for row in begun] == list(range(0, 2 * len(CHAIN), 2))
    alone = make(folder, "single", 1, max_steps=2 * len(CHAIN))
    assert one_rank(alone) == "done"
    assert losses(chain) == pytest.approx(losses(alone), rel=1e-9)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(chain)[name], value, rtol=1e-9, atol=1e-12)


def what_was_saved_in_parts_is_exported_whole(divided: RunDir, folder: Path) -> None:
    """And a run that starts from it begins where the other one ended."""
    plainfile.export(divided, folder / "weights.pt")
    run = make(folder / "run", "single", 1, start_from=str(folder / "weights.pt"), max_steps=1)
    assert one_rank(run) == "done"
    (end,) = records(divided, "eval")
    assert losses(run)[0] < losses(divided)[0] - 0.2  # it has learned something
    assert end["metrics"]["loss"] == pytest.approx(losses(run)[0], abs=0.3)


@pytest.mark.parametrize("texts", [COMPILED, pytest.param(ALL_COMPILED, marks=pytest.mark.full)])
def test_compiled_it_trains_the_same(texts: list[str], alone: RunDir, tmp_path: Path) -> None:
    made = [make(tmp_path / text, text, **{"train.compile": True}) for text in texts]
    train_all(tmp_path, SIZE, [(run, 1, 0, "") for run in made])
    for run in made:
        it_trains_as_one_process(run, alone)


def test_dropout_batch_norm_and_half_precision(
    others: dict[str, RunDir], alone: RunDir, tmp_path: Path
) -> None:
    ranks_that_share_a_layer_draw_the_same(others, tmp_path / "run")
    a_pipeline_leaves_a_batch_norm_the_statistics_of_its_micro_batches(others)
    assert losses(others["forms"]) == losses(others["norm"])
    for name in ("norm fsdp", "norm pp,ddp"):
        what_is_evaluated_is_what_is_saved(others[name])
    a_schedule_of_ones_own_goes_on_whatever_the_groups(others)
    for layout in MIXED:
        half_precision_stays_near(others[" ".join(layout)], alone)


def ranks_that_share_a_layer_draw_the_same(others: dict[str, RunDir], folder: Path) -> None:
    alone = make(folder, "single", 1, **DROPOUT)
    assert one_rank(alone) == "done"
    assert losses(others["dropout"]) == pytest.approx(losses(alone), rel=1e-9)
    for name, value in weights(alone).items():
        torch.testing.assert_close(weights(others["dropout"])[name], value, rtol=1e-9, atol=1e-12)


def a_pipeline_leaves_a_batch_norm_the_statistics_of_its_micro_batches(
    others: dict[str, RunDir],
) -> None:
    assert losses(others["norm"]) == pytest.approx(losses(others["norm alone"]), rel=1e-9)
    found, wanted = weights(others["norm"]), weights(others["norm alone"])
    assert any("running_var" in name for name in wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def what_is_evaluated_is_what_is_saved(run: RunDir) -> None:
    """Each rank had statistics of its own."""
    told: dict[str, Any] = {}
    exec(NORM, told)
    model, data = told["model"]().double(), told["dataset"]("eval")
    saved = {n.removeprefix("model."): value for n, value in weights(run).items()}
    model.load_state_dict(saved)
    x, y = data.tensors
    with torch.no_grad():
        loss = told["loss"](model.eval()(x.double()), y).item()
    assert records(run, "eval")[-1]["metrics"]["loss"] == pytest.approx(loss, rel=1e-9)


def a_schedule_of_ones_own_goes_on_whatever_the_groups(others: dict[str, RunDir]) -> None:
    assert losses(others["own"]) == pytest.approx(losses(others["own alone"]), rel=1e-9)
    assert len(losses(others["own"])) == 2 * len(OWN_CHAIN)


def half_precision_stays_near(run: RunDir, alone: RunDir) -> None:
    assert losses(run) == pytest.approx(losses(alone), rel=5e-3)
    assert losses(run) != pytest.approx(losses(alone), rel=1e-7)  # and it is half precision
