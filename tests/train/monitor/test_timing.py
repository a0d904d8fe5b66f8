"""Each rank's own figures, from real ranks."""

import copy
import importlib
import io
import json
import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import CALM, make_run, records, train_all
from torch import nn

from hpcddp.rundir import RunDir, read_lines
from hpcddp.train.monitor import timing
from hpcddp.train.monitor.timing import Clock, RankFigures

GPU = torch.device("cuda", 0)

# One worker, one group of ranks for all, which the first test waits for.
pytestmark = [pytest.mark.xdist_group("timing"), pytest.mark.timeout(900)]

# A rank's forward pass, or its data, is slow up to some step; a BatchNorm has buffers, which DDP
# sends from rank 0 at the beginning of each forward pass.
SLOW = """
import time
import torch.distributed as dist

class Slow(nn.Module):
    def __init__(self, rank, until):
        super().__init__()
        self.rank, self.until, self.calls = rank, until, 0
    def forward(self, x):
        if torch.is_grad_enabled() and self.until:
            self.calls += 1
            slow = dist.get_rank() == self.rank and self.calls <= self.until
            time.sleep(0.12 if slow else 0.01)  # beside which a wait for a core is little
        return x

def model(slow=-1, until=0):
    first, second = (nn.Sequential(nn.Linear(4, 4), norm()) for norm in (lambda: nn.BatchNorm1d(4),
                                                                        nn.Tanh))
    return nn.Sequential(first, second, Slow(slow, until), nn.Linear(4, 2)).double()

_dataset = dataset
class Late(TensorDataset):
    rank = -1
    def __getitem__(self, index):
        if dist.get_rank() == self.rank:
            time.sleep(0.03)
        return super().__getitem__(index)
def dataset(split, late=-1, **how):
    found = Late(*_dataset(split, **how).tensors)
    found.rank = late
    return found
"""
KEYS = {**CALM, "global_batch": 8, "max_steps": 20, "epochs": 0, "gpus": 4, "extra": SLOW}


def lines(run: RunDir) -> list[dict[str, Any]]:
    return list(read_lines(run.attempt(1).ranks))


def told(run: RunDir, event: str, what: str = "compute") -> list[tuple[int, str]]:
    """Of whom it was told. Where many share two cores a rank may wait for its turn to read."""
    return [(r["rank"], r["host"]) for r in records(run, event) if r["what"] == what]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunDir]:
    """One group of four ranks trains all of these."""
    folder, data = tmp_path_factory.mktemp("slow"), {"held_out": 1, "size": 400}
    keys = {name: value for name, value in KEYS.items() if name != "dataset__held_out"}
    keys |= {"checkpoint__every": 0, "train__eval_every": 0, "metrics__slow": 3.0}
    slow = {"slow": 2, "until": 9}
    asked: dict[str, dict[str, Any]] = {
        "model": {"model": slow, "dataset": data, "max_steps": 60},
        "data": {"dataset": {**data, "late": 0}},
        "stages": {"model": {**slow, "until": 30}, "dataset": data, "strategy": "pp=2,ddp=2",
                   "global_batch": 16},
        "divided": {"dataset": data, "strategy": "fsdp", "max_steps": 6},
        "off": {"dataset": {**data, "late": 0}, "metrics__ranks": False, "max_steps": 6},
    }  # fmt: skip
    made = {name: make_run(folder / name, **keys | more) for name, more in asked.items()}
    cpus = os.sched_getaffinity(0)  # the advice for slow data depends on how many there are
    os.sched_setaffinity(0, sorted(cpus)[:2])
    try:
        train_all(folder, 4, [(run, 1, 0, "") for run in made.values()])
    finally:
        os.sched_setaffinity(0, cpus)
    return made


def test_a_slow_rank_is_named_with_its_host_and_no_other_and_recovers(
    runs: dict[str, RunDir],
) -> None:
    assert told(runs["model"], "slow") == told(runs["model"], "recovered") == [(2, "h2")]
    (found,) = (r for r in records(runs["model"], "slow") if r["what"] == "compute")
    assert found["ratio"] > 1.5 and 0.12 < found["own_s"] < 0.26 and found["median_s"] < 0.03
    assert 2 <= found["since"] <= 4 <= found["step"] and found["since_time"] < found["time"]
    assert max(r["step"] for r in records(runs["model"], "recovered")) >= 12


def test_a_rank_with_slow_data_is_told_apart_and_nobody_is_slow_who_waits_for_it(
    runs: dict[str, RunDir],
) -> None:
    run = runs["data"]
    assert told(run, "slow", "data") == [(0, "h0")]
    waiting, *_ = records(run, "waiting")
    assert waiting["share"] > 0.2 and "set data.workers to 1" in waiting["hint"]
    for own in zip(*(line["busy_s"] for line in lines(run)), strict=True):
        assert min(own) < 0.02
    for record in records(run, "train")[2:]:
        assert 0.06 <= record["wait_s"] <= record["step_s"]


def test_a_pipelines_slow_rank_is_named_beside_its_own_stage(runs: dict[str, RunDir]) -> None:
    """Of stage 1, which is ranks 2 and 3."""
    assert told(runs["stages"], "slow") == [(2, "h2")]
    assert all(None not in line["busy_s"] for line in lines(runs["stages"]))


def test_each_record_has_a_line_with_a_figure_of_each_rank(runs: dict[str, RunDir]) -> None:
    run = runs["model"]
    found = lines(run)
    assert [line["step"] for line in found] == [r["step"] for r in records(run, "train")]
    assert all(set(line) == {"step", "time", *RankFigures._fields} for line in found)
    assert all(len(line[name]) == 4 for line in found for name in RankFigures._fields)
    last = found[-1]
    assert all(50e6 < held < 5e9 for held in last["memory"]) and last["gpu"] == [None] * 4
    assert all(0 < busy < step for busy, step in zip(last["busy_s"], last["step_s"], strict=True))
    rates = [r["samples_per_s"] for r in records(run, "train")]
    each = [sum(line["samples_per_s"]) / rate for line, rate in zip(found, rates, strict=True)]
    assert statistics.median(each) == pytest.approx(1, rel=0.25)


def test_where_a_forward_pass_waits_for_others_nobody_knows_its_own_time(
    runs: dict[str, RunDir],
) -> None:
    assert all(line["busy_s"] == [None] * 4 for line in lines(runs["divided"]))
    assert all(min(line["wait_s"]) > 0 for line in lines(runs["divided"]))


def test_without_ranks_the_longest_wait_is_told_and_no_more(runs: dict[str, RunDir]) -> None:
    assert lines(runs["off"]) == [] and not records(runs["off"], "slow")
    assert all(r["wait_s"] > 0.05 for r in records(runs["off"], "train")[2:])


def test_a_line_holds_no_word_that_json_does_not_have(runs: dict[str, RunDir]) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    for text in runs["divided"].attempt(1).ranks.read_text().splitlines():
        json.loads(text, parse_constant=refuse)


CPU = torch.device("cpu")


def busy(clock: Clock) -> float:
    return RankFigures(*clock.take(1, 1.0)).busy_s


@pytest.mark.parametrize("compiled", [False, True])
def test_an_evaluation_is_no_step_and_a_compiled_model_is_counted_too(compiled: bool) -> None:
    clock, module = Clock(CPU), nn.Linear(2, 2)
    if compiled:
        module._compiled_call_impl = module._call_impl  # as Module.compile leaves it
    clock.watch([module])
    with torch.no_grad():
        module(torch.ones(1, 2))
    assert math.isnan(busy(clock))
    module(torch.ones(1, 2))
    assert busy(clock) > 0
    clock.forget()
    assert math.isnan(busy(clock))


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "saved": saved,
    "copied": copy.deepcopy,
    "traced": lambda module: torch.jit.trace(module, X),
    "scripted": torch.jit.script,
    "compiled": lambda module: torch.compile(module, backend="eager", fullgraph=True),
    "part": lambda module: torch.compile(lambda x: module(x) + 0, backend="eager", fullgraph=True),
}
X = torch.ones(1, 2)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_model_that_is_timed_can_be_saved_copied_and_compiled(graph: bool) -> None:
    """As one's own loop may do with its model: and of that nothing is timed."""
    clock, module = Clock(CPU), nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    module = torch.fx.symbolic_trace(module) if graph else module
    clock.watch([module])
    for name, make in COPIES.items():
        if graph and name == "scripted":
            continue
        other = make(module)
        clock.forget()
        assert torch.equal(other(X), other(X)) and math.isnan(busy(clock)), name
        assert torch.equal(other(X), module(X)) and busy(clock) > 0, name


def test_layers_that_wait_for_other_ranks_are_not_counted() -> None:
    clock = Clock(CPU)
    clock.watch([nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))])
    assert math.isnan(busy(clock))


def test_where_nothing_tells_the_memory_it_is_not_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing, "STATM", tmp_path / "none")
    assert math.isnan(RankFigures(*Clock(CPU).take(1, 1.0)).memory)


def test_torch_has_what_it_asks_a_driver_with() -> None:
    assert hasattr(importlib.import_module("pynvml"), "nvmlDeviceGetUtilizationRates")


def test_a_driver_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOOK_SECONDS", 0.0)
    answers = iter([40, RuntimeError("unknown error"), 60])

    def ask(device: torch.device) -> float:
        assert device == GPU
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    use = timing._Use(GPU, ask)
    assert use.look() == 40
    assert math.isnan(use.look())
    assert use.look() == 60


def test_without_what_asks_it_nobody_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOOK_SECONDS", 0.0)
    asked = []

    def ask(device: torch.device) -> float:
        asked.append(device)
        raise ModuleNotFoundError("nvidia-ml-py")

    use = timing._Use(GPU, ask)
    assert math.isnan(use.look()) and math.isnan(use.look())
    assert asked == [GPU]
