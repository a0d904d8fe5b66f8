"""How exact a training computes, and how much alike two of them are."""

import sys

import pytest
import torch
from ranks import Ranks, make_run, one_rank, records

from hpcddp.rundir import read_json
from hpcddp.spec import TrainSpec
from hpcddp.train.checkpoint import dcp_files
from hpcddp.train.setup import set_modes


@pytest.fixture
def modes():
    """This process's, as they were."""
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = cudnn
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("tf32", [False, True])
def test_float32_products_on_a_gpu_are_exact_unless_asked_otherwise(modes, tf32):
    """The switches are there without a GPU too."""
    set_modes(TrainSpec(tf32=not tf32), torch.device("cuda"))
    set_modes(TrainSpec(tf32=tf32), torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert not torch.are_deterministic_algorithms_enabled()


def test_on_a_cpu_no_switch_of_a_gpu_is_touched(modes):
    set_modes(TrainSpec(tf32=True), torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"


def test_two_deterministic_trainings_are_equal_to_the_last_bit(modes, tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    found = []
    for name in ("one", "two"):
        run = make_run(tmp_path / name, train__deterministic=True, model__dropout=0.3)
        one_rank(run)
        assert torch.are_deterministic_algorithms_enabled()
        found.append((records(run, "train"), dcp_files.read_all(run.checkpoints / "step-6")))
    (ours, saved), (theirs, again) = found
    assert [r["loss"] for r in ours] == [r["loss"] for r in theirs]
    assert all(torch.equal(saved[name], again[name]) for name in saved)


PUTS = """
_loss = loss
def loss(output, target):
    torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
    return _loss(output, target)
"""


def test_what_cannot_be_deterministic_is_a_mistake_that_names_it(tmp_path):
    run = make_run(tmp_path, extra=PUTS, train__deterministic=True)
    with Ranks.of(run, 1) as ranks:
        ((code, _, err),) = ranks.wait()
    assert code == 1
    told = read_json(run.attempt(1).error)
    assert told["kind"] == "mistake"
    assert told["message"].startswith("put_ does not have a deterministic implementation")
    assert "put_ does not have" in err


SEES = """
seen = set()
_loss = loss
def loss(output, target):
    seen.add((str(output.dtype), torch.is_autocast_enabled("cpu")))
    return _loss(output, target)
"""


@pytest.mark.parametrize(
    "precision, seen",
    [("fp64", ("torch.float64", False)), ("bf16", ("torch.bfloat16", True)),
     ("fp32", ("torch.float32", False))],
)  # fmt: skip
def test_autocast_is_for_half_precision_only(tmp_path, precision, seen):
    """The model and its samples are float32, which fp64 makes float64."""
    run = make_run(tmp_path, extra=SEES, train__precision=precision, max_steps=2)
    source = tmp_path / "small_task.py"
    text = source.read_text().replace(".double()", "")
    source.write_text(text.replace("dtype=torch.float64", "dtype=torch.float32"))
    one_rank(run)
    assert sys.modules["small_task"].seen == {seen}
    weight = dcp_files.read_all(run.checkpoints / "step-2")["model.0.weight"]
    assert weight.dtype == (torch.float64 if precision == "fp64" else torch.float32)
