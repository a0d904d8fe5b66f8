"""What is found of a model without its memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import TASK

from hpcddp import spec
from hpcddp.errors import JobFileError
from hpcddp.model_profile import ModelProfile, TensorShare
from hpcddp.strategy import Layout
from hpcddp.train.model_sketch import Ask, sketch

ALONE = [list(Layout())]


def facts(
    folder: Path, extra: str = "", meshes: list[list[Any]] = ALONE, pp: int = 1, **keys: Any
) -> ModelProfile:
    source = folder / "looked_at.py"
    source.write_text(TASK + extra)
    values = {name.replace("__", "."): value for name, value in keys.items()}
    job = spec.KEYS.build({"task": str(source), "global_batch": 8, **values})
    return sketch(Ask(spec.to_dict(job), str(folder), meshes, [pp]))


def view(found: ModelProfile, ranks: int = 1) -> TensorShare:
    made = found.views[ranks]
    assert isinstance(made, TensorShare)
    return made


def test_a_model_larger_than_any_memory_is_looked_at(tmp_path: Path) -> None:
    huge = "def model():\n    return nn.Linear(4, 1 << 40)\n"
    found = facts(tmp_path, huge)
    assert view(found).shapes == [[1 << 40, 4], [1 << 40]] and not found.notes
    assert not view(found).unknown


def test_in_float64_too(tmp_path: Path) -> None:
    """In a process of its own, where more looks at a tensor."""
    tied = """
def model():
    made = nn.Sequential(nn.Linear(4, 1 << 40), nn.BatchNorm1d(4), nn.Linear(4, 1 << 40))
    made[2].weight = made[0].weight
    return made
"""
    (tmp_path / "looked_at.py").write_text(TASK + tied)
    keys = {"task": str(tmp_path / "looked_at.py"), "global_batch": 8, "train.precision": "fp64"}
    ask = Ask(spec.to_dict(spec.KEYS.build(keys)), str(tmp_path), ALONE, [1])
    done = subprocess.run(
        [sys.executable, "-m", "hpcddp.train.model_sketch"],
        input=json.dumps(ask._asdict()), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert not [note for note in told["notes"] if "built on the CPU" in note], told["notes"]
    assert [(w["name"], w["state"]) for w in told["weights"]][:2] == [
        ("0.weight", 16),
        ("0.bias", 16),
    ]
    assert "2.weight" not in [w["name"] for w in told["weights"]]


def test_weights_tell_what_the_optimizer_keeps(tmp_path: Path) -> None:
    adamw = facts(tmp_path).weights  # in float64
    assert [(w.name, w.size, w.state, w.extra, w.group) for w in adamw] == [
        (name, 8, 16, 4, 0) for name in ("0.weight", "0.bias", "3.weight", "3.bias")
    ]


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        ("torch.optim.SGD(model.parameters(), lr=0.1)", 0),
        ("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", 8),
        ("torch.optim.Adam(model[0].parameters(), amsgrad=True)", 24),
    ],
)
def test_an_optimizer_of_its_own_counts(tmp_path: Path, optimizer: str, state: int) -> None:
    found = facts(tmp_path, f"\ndef optimizer(model, train):\n    return {optimizer}\n").weights
    assert found[0].state == state
    if "[0]" in optimizer:
        assert (found[2].group, found[2].state) == (-1, 0)


def test_an_optimizer_that_cannot_be_tried_is_taken_for_adamw(tmp_path: Path) -> None:
    own = "\ndef optimizer(model, train):\n    return torch.optim.LBFGS(model.parameters())\n"
    found = facts(tmp_path, own)
    assert found.weights[0].state == 16
    assert any("for AdamW" in note for note in found.notes)


# Inputs of [4] float64 and targets: Linear and Tanh keep [8] each, cross entropy [2] twice.
def test_activations_are_what_the_backward_pass_needs(tmp_path: Path) -> None:
    found = view(facts(tmp_path))
    total = sum(amount.each for amount in found.saved)
    assert 8 * (4 + 8 + 2) <= total <= 8 * (4 + 8 + 8 + 2 + 2 + 2)


def test_what_is_computed_again_is_not_kept(tmp_path: Path) -> None:
    blocks = "\ndef blocks(model):\n    return ['0', '1']\n"
    whole, again = (view(facts(tmp_path, blocks, train__recompute=on)) for on in (False, True))
    assert (whole.inner.each, again.inner.each) == (0, 64)  # what Tanh keeps
    assert sum(a.each for a in again.saved) < sum(a.each for a in whole.saved) + 32


def test_one_of_the_ranks_of_tp_has_its_share_of_the_layers(tmp_path: Path) -> None:
    found = facts(tmp_path, meshes=[list(Layout()), list(Layout(tp=2))])
    assert view(found).shapes == [[8, 4], [8], [2, 8], [2]]
    assert view(found, 2).shapes == [[4, 4], [4], [2, 4], [2]]
    # The second layer's outputs are added up; the first one's inputs need no gradient.
    assert sum(amount.each for amount in view(found, 2).reduced) == 2 * 8


def test_what_strategies_ask_too_much_of_the_model(tmp_path: Path) -> None:
    found = facts(tmp_path, meshes=[list(Layout(tp=3)), list(Layout(pp=4))], pp=4)
    assert "divide 0 over 3 ranks" in str(found.views[3])
    assert "4 stages from 2 parts" in str(found.stages[4])
    assert found.micros == {"tp=3": (8, 1), "pp=4": (2, 4)}


def test_no_parts_are_one(tmp_path: Path) -> None:
    found = facts(tmp_path, "def model():\n    return nn.Bilinear(4, 4, 2)\n", pp=2)
    assert "the order of its parts is unknown" in str(found.stages[2])
    assert found.stages[1] == [[0]]
    assert "forward pass fails: TypeError" in view(found).unknown  # it takes two inputs


def test_without_data_activations_are_not_known(tmp_path: Path) -> None:
    own = "def dataset(split):\n    return open('/nowhere/data.bin')\n"
    found = facts(tmp_path, own)
    assert "FileNotFoundError" in view(found).unknown
    assert len(found.weights) == 4


def test_a_model_that_reads_its_numbers_is_made_on_the_cpu(tmp_path: Path) -> None:
    own = "def model():\n    nn.Linear(4, 2).bias.tolist()\n    return nn.Linear(4, 2).double()\n"
    found = facts(tmp_path, own)
    assert "built on the CPU" in found.notes[0]
    assert [amount.each > 0 for amount in view(found).saved] == [True]


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        ("import nowhere\n", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("def model():\n    return nn.Linear()\n", "model() fails: TypeError"),
        ("model = 3\n", "function model is missing"),
    ],
)
def test_what_is_wrong_with_a_task_is_said(tmp_path: Path, extra: str, what: str) -> None:
    with pytest.raises(JobFileError, match=r"looked_at\.py") as caught:
        facts(tmp_path, extra)
    assert what in caught.value.what
