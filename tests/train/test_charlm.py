"""The shipped job charlm: a GPT that looks at what came before alone, in pieces that fit."""

import copy
import math
from collections import OrderedDict
from importlib import import_module

import pytest
import torch
from ranks import make_run, one_rank, records
from torch import nn

from hpcddp import spec
from hpcddp.errors import JobFileError
from hpcddp.planning import jobfile, resources
from hpcddp.train.rank import task_module

pytestmark = pytest.mark.usefixtures("one_thread")
charlm = import_module("hpcddp.jobs.charlm")
SMALL = {"layers": 2, "width": 16, "heads": 4, "context": 12}


@pytest.fixture
def small():
    torch.manual_seed(0)
    made = charlm.model(**SMALL).double()
    for weight in made.parameters():  # the first ones hardly tell one input from another
        nn.init.normal_(weight, std=0.5)
    return made


def characters(batch=3, length=12):
    return torch.randint(96, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_gives_logits_for_each_place_in_either_precision(dtype):
    output = charlm.model(**SMALL).to(dtype)(characters(length=7))
    assert output.shape == (3, 7, 96) and output.dtype == dtype
    loss = charlm.loss(output, characters(length=7))
    assert loss.shape == () and loss.item() == pytest.approx(math.log(96), abs=0.05)
    accuracy = charlm.metrics(output, output.argmax(2))["accuracy"]
    assert accuracy.tolist() == [1.0] * 3


def test_a_later_character_does_not_change_earlier_outputs(small):
    x = characters()
    y = x.clone()
    y[:, 8] = (y[:, 8] + 1) % 96
    before, after = small(x), small(y)
    torch.testing.assert_close(after[:, :8], before[:, :8], rtol=0, atol=1e-12)
    assert all((after[:, place] - before[:, place]).abs().max() > 1e-3 for place in range(8, 12))


def test_its_parts_one_after_the_other_are_the_model(small):
    assert [name for name, _ in small.named_children()] == ["embed", "block0", "block1", "head"]
    assert charlm.blocks(small) == ["block0", "block1"]
    x = output = characters()
    for part in small.children():
        output = part(output)
    assert torch.equal(output, small(x))


def half(block, number):
    """What one of two ranks has of a block: rows of the colwise layers, columns of the rowwise."""
    mine = copy.deepcopy(block)
    for name, style in charlm.tp_plan(nn.Sequential(OrderedDict(b=block))).items():
        layer = mine.get_submodule(name.removeprefix("b."))
        layer.weight = nn.Parameter(layer.weight.chunk(2, int(style == "rowwise"))[number])
        bias = layer.bias / 2 if style == "rowwise" else layer.bias.chunk(2)[number]
        layer.bias = nn.Parameter(bias)  # a rowwise one is added once: here half by each rank
    return mine


def test_two_ranks_of_tp_with_half_of_each_layer_sum_to_the_whole(small):
    plan = charlm.tp_plan(small)
    assert all(isinstance(small.get_submodule(name), nn.Linear) for name in plan)
    assert len(plan) == 6 * SMALL["layers"]
    x, whole = torch.randn(3, 12, 16, dtype=torch.float64), small.block1
    halves = half(whole, 0), half(whole, 1)
    for part in "attention", "mlp":
        found = sum(mine.get_submodule(part)(x) for mine in halves)
        torch.testing.assert_close(found, whole.get_submodule(part)(x))


def test_heads_that_the_ranks_of_tp_cannot_share_are_told(small):
    attention = small.block0.attention
    for layer in (attention.query, attention.key, attention.value):
        layer.weight, layer.bias = nn.Parameter(layer.weight[:6]), nn.Parameter(layer.bias[:6])
    with pytest.raises(JobFileError, match=r"heads equally: 1\.5 each"):
        small(characters())


BAD = [
    ("layers", 0), ("width", 2.5), ("heads", 3), ("heads", "4"), ("context", True),
    ("context", -1), ("dropout", 1.0), ("dropout", -0.1), ("dropout", "x"), ("dropout", math.nan),
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD)
def test_options_that_make_no_model_are_refused(name, value):
    with pytest.raises(JobFileError) as error:
        charlm.model(**{name: value})
    assert error.value.where == f"model.{name}"


@pytest.mark.parametrize("context", [0, 10**7])
def test_pieces_that_the_text_has_not_are_refused(context):
    with pytest.raises(JobFileError) as error:
        charlm.dataset("eval", context)
    assert error.value.where == "dataset.context"


def test_pieces_longer_than_the_models_context_are_refused(small):
    with pytest.raises(JobFileError, match=r"13 characters, but model\.context is 12"):
        small(characters(length=13))


def test_the_pieces_follow_one_another_and_the_last_tenth_is_held_out():
    text = "".join(c if c in charlm.CHARACTERS else "?" for c in charlm._text())
    assert len(text) > 400_000 and text.count("the") > 1000

    def read(numbers):
        return "".join(charlm.CHARACTERS[number] for number in numbers.flatten().tolist())

    train, held_out = (charlm.dataset(split, context=50) for split in ("train", "eval"))
    begin = len(text) * 9 // 10
    for found, start, end in (train, 0, begin), (held_out, begin, len(text)):
        inputs, targets = found.tensors
        assert 0 <= end - start - 1 - inputs.numel() < 50
        assert read(inputs) == text[start : start + inputs.numel()]
        assert read(targets) == text[start + 1 : start + 1 + inputs.numel()]
        assert [item.shape for item in found[3]] == [(50,), (50,)]


def test_the_shipped_job_fits_its_task():
    layer = jobfile.file_layer(resources.folder("jobs") / "charlm.toml")
    job = spec.KEYS.build(layer.values)
    found = task_module.load(job, ".")
    made = found.model()
    x, y = found.dataset("eval")[0]
    assert found.loss(made(x[None]), y[None]).item() == pytest.approx(math.log(96), abs=0.1)
    assert found.cut("blocks", made) == [f"block{i}" for i in range(job.model["layers"])]
    assert job.max_steps >= job.train.warmup_steps * 5


def test_it_learns_more_than_the_characters_frequencies(tmp_path):
    text = (resources.folder("jobs") / "charlm.py").read_text()
    options = {"model__layers": 1, "model__width": 32, "model__context": 32, "dataset__context": 32}
    run = make_run(tmp_path, text, max_steps=60, global_batch=32, train__lr=1e-2,
                   train__warmup_steps=5, checkpoint__every=0, **options)  # fmt: skip
    assert one_rank(run) == "done"
    losses = [r["loss"] for r in records(run, "train")]
    assert losses[0] == pytest.approx(math.log(96), abs=0.1)
    held_out = records(run, "eval")[-1]["metrics"]
    assert held_out["loss"] < 3.0  # by the frequencies alone it is 3.24
    assert 0.15 < held_out["accuracy"] < 1
