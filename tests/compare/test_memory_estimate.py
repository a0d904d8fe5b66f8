"""What a strategy takes: the estimate beside real ranks, and its arithmetic."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from ranks import one_rank, records, train_all
from sites import record_run

from hpcddp import record, spec, strategy
from hpcddp.compare import memory_estimate
from hpcddp.compare.memory_estimate import Estimate
from hpcddp.model_profile import Amount, ModelProfile, TensorShare, Weight
from hpcddp.planning import resources
from hpcddp.rundir import RunDir
from hpcddp.spec import JobSpec
from hpcddp.train import model_sketch

# One worker, one group of ranks for all, which the first test waits for.
pytestmark = [pytest.mark.xdist_group("budget"), pytest.mark.timeout(900)]

KEYS = {
    "global_batch": 64,
    "max_steps": 4,
    "train.log_every": 3,  # the first step has a record too, and after it the ranks are warm
    "train.measure": True,
    "checkpoint.every": 0,
    "checkpoint.best": "",
}
PAIRS = [(job, text) for job in ("charlm", "digits") for text in ("ddp", "zero1", "fsdp", "pp")]
PAIRS.append(("charlm", "tp"))
FULL = {("digits", "ddp"), ("digits", "fsdp"), ("digits", "pp")}
# Strategy, keys, and the share of the gradients that is left when a step ends: those that add up
# over micro-batches beside DDP's buckets are gone then.
FOURS: list[tuple[str, dict[str, Any], float]] = [
    ("hsdp=2", {}, 1),
    ("fsdp", {"train.micro_batch": 4}, 1),
    ("tp=2,ddp", {}, 1),
    ("tp=2,fsdp", {}, 1),
    ("pp=2,ddp", {"pp.schedule": "interleaved"}, 0.5),
    ("pp=2,fsdp", {"pp.schedule": "gpipe", "pp.chunks": 4}, 1),
    ("pp=2,zero1", {}, 0.5),
    ("pp=2,tp=2", {"train.recompute": True}, 1),
    ("ddp", {"train.micro_batch": 4, "train.recompute": True}, 0.5),
]
Case = tuple[str, str, dict[str, Any]]
Measured = tuple[dict[str, Any], Estimate]


def make(folder: Path, job: str, text: str, size: int, **more: Any) -> RunDir:
    run = RunDir(folder / "run")
    run.attempts.mkdir(parents=True)
    task = str(resources.folder("jobs") / f"{job}.py")
    made = spec.KEYS.build({"task": task, "strategy": text, **KEYS, **more})
    return record_run(run, (1, 1), size, "local", spec=spec.to_dict(made), workdir=str(folder))


def measured(folder: Path, size: int, cases: list[Case]) -> list[Measured]:
    """The last record of each case, and the estimate of it."""
    runs = [make(folder / str(i), *case[:2], size, **case[2]) for i, case in enumerate(cases)]
    train_all(folder, size, [(run, 1, 0, "") for run in runs])
    meshes = [strategy.layout(text, 1, size) for _, text, _ in cases]
    facts: dict[str, ModelProfile] = {}
    pairs = []
    for run, (name, _, more), mesh in zip(runs, cases, meshes, strict=True):
        job, alike = spec.from_dict(record.read(run).spec), f"{name} {more}"
        facts[alike] = facts.get(alike) or look(job, meshes)
        made = memory_estimate.estimate(facts[alike], mesh, job, size)
        assert isinstance(made, Estimate)
        pairs.append((records(run, "train")[-1], made))
    return pairs


def look(job: JobSpec, meshes: list[strategy.Layout]) -> ModelProfile:
    """The facts as they come out of the process that finds them."""
    stages = [memory_estimate.stages_of(job, mesh) for mesh in meshes]
    asked = model_sketch.Ask(spec.to_dict(job), ".", [list(mesh) for mesh in meshes], stages)
    return ModelProfile.load(json.loads(json.dumps(dataclasses.asdict(model_sketch.sketch(asked)))))


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[tuple[str, str], Measured]:
    """Two ranks."""
    wanted = [pair for pair in PAIRS if pair not in FULL or pytestconfig.getoption("--full")]
    cases: list[Case] = [(job, text, {}) for job, text in wanted]
    pairs = measured(tmp_path_factory.mktemp("two"), 2, cases)
    return dict(zip(wanted, pairs, strict=True))


def most(made: Estimate, part: str) -> float:
    """Of the rank that has most of one thing, as it is measured."""
    return max(getattr(need, part) for need in made.needs)


def compare(line: dict[str, Any], made: Estimate, case: str, left: float = 1) -> None:
    """What is there at the end of a step, and what was sent in one.

    Args:
        left: the share of the gradients.
    """
    for part in ("parameters", "gradients", "optimizer", "buffers"):
        share = left if part == "gradients" else 1
        assert line["memory"][part] == pytest.approx(share * most(made, part), rel=0.01), (
            part, case,
        )  # fmt: skip
    assert line["sent"] == pytest.approx(made.sent["gloo"], rel=0.1), case


@pytest.mark.parametrize(
    ("job", "text"),
    [pytest.param(*pair, marks=pytest.mark.full if pair in FULL else ()) for pair in PAIRS],
)
def test_two_ranks_have_and_send_what_was_estimated(
    two: dict[tuple[str, str], Measured], job: str, text: str
) -> None:
    compare(*two[job, text], f"{job} {text}")


@pytest.mark.parametrize("text", ["ddp", "zero1", "fsdp", "tp", "pp"])
def test_activations_are_half_to_twice_of_what_a_rank_takes_at_its_peak(
    two: dict[tuple[str, str], Measured], text: str
) -> None:
    line, made = two["charlm", text]
    rest = sum(most(made, part) for part in ("gradients", "optimizer", "other"))
    taken = line["memory"]["peak"] - rest
    assert taken / 2 < most(made, "activations") < taken * 2


def test_a_run_that_does_not_measure_tells_nothing(tmp_path: Path) -> None:
    one_rank(make(tmp_path, "digits", "single", 1, **{"train.measure": False, "max_steps": 1}))
    (line,) = records(RunDir(tmp_path / "run"), "train")
    assert not {"memory", "sent"} & line.keys()


def test_one_process_sends_nothing(tmp_path: Path) -> None:
    one_rank(make(tmp_path, "digits", "single", 1, **{"max_steps": 1}))
    (line,) = records(RunDir(tmp_path / "run"), "train")
    assert line["sent"] == 0 and line["memory"]["peak"] > line["memory"]["gradients"]


@pytest.mark.full
def test_four_ranks_have_and_send_what_was_estimated(tmp_path: Path) -> None:
    pairs = measured(tmp_path, 4, [("charlm", text, more) for text, more, _ in FOURS])
    for (text, more, left), (line, made) in zip(FOURS, pairs, strict=True):
        compare(line, made, f"{text} {more}", left)


# A model of three blocks of 1,000 numbers and 100 beside, in float32, under AdamW; its two parts
# keep 10 bytes a sample each, and give the next one 5.
BLOCKS = [Weight(f"b{i}", 4, True, 8.0, 4.0, 0, part=i // 2, block=i) for i in range(3)]
WEIGHTS = [*BLOCKS, Weight("head", 4, True, 8.0, 4.0, 0, part=1)]
SHAPES = [[100, 10]] * 3 + [[100]]
TOTAL = 4 * 3100


def reckon(text: str, nodes: int, gpus: int, **keys: Any) -> Estimate:
    job = spec.KEYS.build({name.replace("__", "."): value for name, value in keys.items()})
    mesh = strategy.layout(text, nodes, gpus)
    view = TensorShare(SHAPES, [Amount(0, 10)] * 2, [Amount(0, 5)] * 2, [Amount(0, 3)] * 2)
    count, views = job.pp.chunks or 1, dict.fromkeys((1, 2, 4), view)
    facts = ModelProfile(WEIGHTS, [0, 40], {1: [[0, 1]], 2: [[0], [1]]}, views,
                  {str(mesh): (8, count)})  # fmt: skip
    made = memory_estimate.estimate(facts, mesh, job, gpus)
    assert isinstance(made, Estimate)
    return made


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "nccl", "gloo"),
    [
        ("single", 1, 1, 0, 0),
        ("ddp", 1, 4, 3 * (2 * TOTAL + 40), 3 * (2 * TOTAL + 40)),
        ("zero1", 2, 2, 3 * (3 * TOTAL + 40), 3 * (3 * TOTAL + 40)),
        # What is in no block stays gathered between the passes.
        ("fsdp", 1, 4, 3 * (3 * TOTAL - 360), 3 * (4 * TOTAL - 360)),
        ("hsdp", 2, 2, 2 * (4 * TOTAL - 320), 2 * (5 * TOTAL - 320)),
        ("tp", 1, 4, 2 * 3 * 8 * (3 + 3) + 3 * 40, 2 * 3 * 8 * (3 + 3) + 3 * 40),
        ("pp", 1, 2, 2 * 8 * 5, 2 * 8 * 5),
        ("dp", 1, 4, 3 * (2 * TOTAL + 40), 0),  # on a CPU it is one model
    ],
)
def test_what_a_step_sends(text: str, nodes: int, gpus: int, nccl: int, gloo: int) -> None:
    assert reckon(text, nodes, gpus).sent == {"nccl": nccl, "gloo": gloo}


@pytest.mark.parametrize(
    ("keys", "bytes_"),
    [
        ({"ddp__hook": "fp16"}, TOTAL / 2),
        ({"ddp__hook": "bf16"}, TOTAL / 2),
        ({"ddp__hook": "powersgd", "ddp__rank": 2}, 4 * (3 * 2 * 110 + 100)),
        ({"ddp__hook": "powersgd", "ddp__rank": 5}, TOTAL),  # more would travel than half
    ],
)
def test_a_hook_sends_less(keys: dict[str, Any], bytes_: float) -> None:
    assert reckon("ddp", 1, 2, **keys).sent["nccl"] == 2 * bytes_ + 40


def test_local_sgd_averages_within_a_node_and_now_and_then_all() -> None:
    sent = reckon("ddp", 2, 2, ddp__hook="local_sgd", ddp__period=4).sent["nccl"]
    assert sent == 2 * 2 * TOTAL + 3 * 2 * TOTAL / 4 + 3 * 40
    alone = reckon("ddp", 1, 4, ddp__hook="local_sgd", ddp__period=4).sent
    assert alone == reckon("ddp", 1, 4).sent


def test_powersgd_remembers_as_much_as_the_gradients() -> None:
    assert reckon("ddp", 1, 2, ddp__hook="powersgd").most.other == TOTAL


def test_what_is_divided_is_divided() -> None:
    whole, shared = reckon("ddp", 1, 4).most, reckon("fsdp", 1, 4).most
    assert (whole.parameters, whole.gradients, whole.optimizer) == (TOTAL, TOTAL, 2 * TOTAL + 16)
    assert (shared.parameters, shared.gradients) == (TOTAL / 4, TOTAL / 4)
    zero = reckon("zero1", 1, 4).most
    assert (zero.parameters, zero.optimizer) == (TOTAL, 8004)  # a block, of four pieces
    assert (whole.activations, reckon("dp", 1, 4).most.activations) == (160, 40)


@pytest.mark.parametrize(
    ("schedule", "flying"), [("gpipe", [6, 6]), ("1f1b", [2, 1]), ("interleaved", [5, 3])]
)
def test_a_stage_keeps_what_is_in_flight(schedule: str, flying: list[int]) -> None:
    assert [memory_estimate._flying(schedule, rank, 2, 6) for rank in (0, 1)] == flying
