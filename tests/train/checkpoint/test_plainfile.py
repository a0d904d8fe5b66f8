"""Plain files of weights: what is read, what is refused, and what is never run."""

import contextlib
import os
import pickle
import struct
import sys
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from ranks import make_run, one_rank
from torch import nn

from hpcddp import spec
from hpcddp.errors import CheckpointError, UserError
from hpcddp.train.checkpoint import dcp_files, plainfile

FORMS = ("pt", "safetensors")


def model(width: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1)).to(dtype)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a
    )


@pytest.mark.parametrize("form", FORMS)
def test_any_tensor_comes_back_as_it_was(tmp_path, form):
    weight = torch.randn(4, 6)
    tensors = {
        "tied": weight, "tied too": weight, "turned": weight.T, "row": weight[1],
        "half": weight.bfloat16(), "number": torch.tensor(7), "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False]), "parameter": nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    path = tmp_path / f"weights.{form}"
    plainfile.write(tensors, path)
    theirs = {"pt": torch.load, "safetensors": safetensors.torch.load_file}[form](path)
    for found in (plainfile.read(path), theirs):
        assert same(found, {name: tensor.detach() for name, tensor in tensors.items()})
    assert tensors["tied too"] is weight  # the caller's own are not exchanged
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("form", FORMS)
def test_the_content_says_the_form_and_not_the_suffix(tmp_path, form):
    path = plain = tmp_path / f"weights.{form}"
    plainfile.write({"a": torch.ones(2)}, plain)
    for name in ("weights.bin", "weights", f"weights.{FORMS[form == 'pt']}"):
        path = path.rename(tmp_path / name)
        assert same(plainfile.read(path), {"a": torch.ones(2)})


def test_a_file_from_before_the_zip_is_read_too(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(tmp_path / "old.pt")
    assert same(plainfile.read(tmp_path / "old.pt"), {"a": torch.ones(2)})


@pytest.mark.parametrize("names", [
    ("a", "b.c"),
    ("module.a", "module.b.c"),
    ("_orig_mod.a", "_orig_mod.b.c"),
    ("module._orig_mod.a", "module._orig_mod.b.c"),
    ("_orig_mod.module.a", "_orig_mod.module.b.c"),
    ("module.module.a", "module.module.b.c"),
    ("a", "b._orig_mod.c"),
    ("module.a", "module.b._orig_mod._orig_mod.c"),
])  # fmt: skip
@pytest.mark.parametrize("form", FORMS)
def test_names_are_the_bare_models(tmp_path, names, form):
    path = tmp_path / f"weights.{form}"
    plainfile.write(dict(zip(names, torch.arange(2.0), strict=True)), path)
    assert same(plainfile.read(path), {"a": torch.tensor(0.0), "b.c": torch.tensor(1.0)})


def test_a_name_that_only_looks_so_stays(tmp_path):
    names = {"module.a", "modules.b", "c._orig_mod", "my_orig_mod.d", "e.module.f"}
    plainfile.write({name: torch.ones(1) for name in names}, tmp_path / "weights.pt")
    assert plainfile.read(tmp_path / "weights.pt").keys() == names


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_weights_are_found_among_what_a_program_saved_with_them(tmp_path, key):
    found = {key: {"module.a": torch.ones(2)}, "epoch": 3, "optimizer": {"state": {}}}
    torch.save(found, tmp_path / "checkpoint.pt")
    assert same(plainfile.read(tmp_path / "checkpoint.pt"), {"a": torch.ones(2)})


def test_a_parameter_named_model_is_a_parameter(tmp_path):
    torch.save({"model": torch.ones(2)}, tmp_path / "weights.pt")
    assert same(plainfile.read(tmp_path / "weights.pt"), {"model": torch.ones(2)})


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ({}, "expected a dictionary of named tensors, got an empty one"),
        ([torch.ones(1)], "named tensors, got list"),
        (torch.ones(1), "named tensors, got Tensor"),
        ({"a": torch.ones(1), "epoch": 3}, "'epoch' is int, not a plain tensor"),
        ({3: torch.ones(1)}, "3 is Tensor"),
        ({"state_dict": {}}, "named tensors, got an empty one"),
        ({"a": torch.ones(2).to_sparse()}, "'a' is Tensor, not a plain tensor"),
        ({"a": torch.ones(2, device="meta")}, "'a' is Tensor, not a plain tensor"),
        ({"a": torch.ones(1), "_orig_mod.a": torch.ones(1)}, "a occurs twice"),
    ],
)
def test_what_is_no_table_of_tensors_is_refused(tmp_path, found, what):
    path = tmp_path / "weights.pt"
    torch.save(found, path)
    with pytest.raises(CheckpointError, match=what) as caught:
        plainfile.read(path)
    assert caught.value.where == str(path) and "torch.save(model.state_dict()" in caught.value.hint


def test_what_is_not_there_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="No such file") as caught:
        plainfile.read(tmp_path / "gone.pt")
    assert caught.value.where == str(tmp_path / "gone.pt")
    with pytest.raises(CheckpointError, match="Is a directory") as caught:
        plainfile.read(tmp_path)
    assert "hpcddp export" in caught.value.hint


@pytest.mark.parametrize("form", [*FORMS, "legacy"])
def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(tmp_path, form):
    path = tmp_path / f"weights.{form}"
    tensors = {f"layer.{n}": torch.randn(40) for n in range(3)}
    if form == "legacy":
        torch.save(tensors, path, _use_new_zipfile_serialization=False)
    else:
        plainfile.write(tensors, path)
    whole = path.read_bytes()
    for size in (0, 1, 7, 9, 40, len(whole) // 2, len(whole) - 90, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as caught:
            plainfile.read(path)
        assert "copied completely" in caught.value.hint, size
        assert "weights_only" not in str(caught.value)  # no advice to run what it holds


@pytest.mark.parametrize("content", [
    b"import torch\n", b"\0" * 64, b"PK\x03\x04" + b"x" * 64, b"{}", os.urandom(4096),
    struct.pack("<Q", 2) + b"{}x", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 2) + b"{]",
], ids=[f"file {i}" for i in range(8)])  # fmt: skip
def test_any_other_file_is_refused(tmp_path, content):
    (tmp_path / "weights").write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"not a weights file|it contains|named tensors"
    ) as caught:
        plainfile.read(tmp_path / "weights")
    assert caught.value.where and caught.value.hint


class Evil:
    def __init__(self, call, *args):
        self.call = call, args

    def __reduce__(self):
        return self.call


def save_pickle(found, path):
    path.write_bytes(pickle.dumps(found))


def save_legacy(found, path):
    torch.save(found, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, save_legacy, save_pickle])
@pytest.mark.parametrize("place", ["alone", "as a tensor", "beside", "inside"])
def test_pickled_code_is_refused_and_never_run(tmp_path, save, place):
    path, marker = tmp_path / "weights.pt", tmp_path / "executed"
    evil = Evil(os.mkdir, str(marker))
    found = {
        "alone": evil,
        "as a tensor": {"a": torch.ones(1), "b": evil},
        "beside": {"state_dict": {"a": torch.ones(1)}, "args": evil},
        "inside": {"state_dict": {"a": evil}},
    }[place]
    save(found, path)
    with contextlib.suppress(RuntimeError):  # a pickle alone is no file of torch's, but it runs
        torch.load(path, weights_only=False)
    marker.rmdir()  # the payload works
    with pytest.raises(CheckpointError) as caught:
        plainfile.read(path)
    assert not marker.exists()
    if save is not save_pickle:
        assert "it contains posix.mkdir" in caught.value.what
        assert "hpcddp ran no code from it" in caught.value.what
    assert "weights_only" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_model_takes_weights_in_its_own_precision(tmp_path, form):
    path = tmp_path / f"weights.{form}"
    source, target = model(dtype=torch.float64), model()
    source[1].running_mean.fill_(0.3), source[1].num_batches_tracked.fill_(9)
    plainfile.write(source.state_dict(), path)
    weight = target[0].weight
    plainfile.load_into(target, plainfile.read(path), str(path))
    assert target[0].weight is weight and weight.dtype == torch.float32  # in place
    theirs = source.float().state_dict()
    assert same(target.state_dict(), theirs)
    assert target(torch.ones(4, 2)).requires_grad


class Wrapper(nn.Module):
    """Calls what it holds by the name that DistributedDataParallel uses."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def compiled(module):
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [Wrapper, compiled, lambda m: Wrapper(compiled(m))])
def test_wrapped_models_and_bare_ones_take_each_others_weights(wrap):
    for source, target in ((wrap(model()), model()), (model(), wrap(model())),
                           (wrap(model()), wrap(model()))):  # fmt: skip
        with torch.no_grad():
            for tensor in source.parameters():
                tensor.fill_(0.7)
        plainfile.load_into(target, source.state_dict(), "weights.pt")
        assert all((tensor == 0.7).all() for tensor in target.parameters())


def test_one_name_is_enough_for_a_tensor_that_has_two():
    tied = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    tied["head"].weight = tied["embed"].weight
    for name in ("embed.weight", "head.weight"):
        given = torch.randn(5, 3)
        plainfile.load_into(tied, {name: given}, "weights.safetensors")
        assert torch.equal(tied["embed"].weight, given)
    with pytest.raises(
        CheckpointError, match=r"embed\.weight is missing in the file and \[5, 3\] in the model"
    ):
        plainfile.load_into(tied, {}, "weights.safetensors")


DIFFERENT = {
    "shape": (
        lambda t: t | {"2.weight": torch.zeros(10, 64)},
        "2.weight is [10, 64] in the file and [1, 3] in the model",
        "the names match, the sizes differ: set [model]",
    ),
    "missing": (
        lambda t: {n: v for n, v in t.items() if n != "2.bias"},
        "2.bias is missing in the file and [1] in the model",
        "change model() or [model]",
    ),
    "unexpected": (
        lambda t: t | {"3.bias": torch.zeros(4, 2)},
        "3.bias is [4, 2] in the file and missing in the model",
        "change model() or [model]",
    ),
    "number and list": (
        lambda t: t | {"2.bias": torch.tensor(1.0)},
        "2.bias is [] in the file and [1] in the model",
        "the names match",
    ),
    "prefix": (
        lambda t: {f"net.{n}": v for n, v in t.items()},
        "0.weight is missing in the file and [3, 2] in the model, "
        "0.bias is missing in the file and [3] in the model, "
        "1.weight is missing in the file and [3] in the model; 15 more",
        "in the file each name begins with 'net.'",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_another_models_weights_are_refused_by_name(kind):
    change, what, hint = DIFFERENT[kind]
    ours = model()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    theirs = {name: torch.ones_like(tensor) for name, tensor in before.items()}
    with pytest.raises(CheckpointError) as caught:
        plainfile.load_into(ours, change(theirs), "weights.pt")
    assert caught.value.what == f"the file is of another model: {what}"
    assert caught.value.where == "weights.pt" and hint in caught.value.hint
    assert same(ours.state_dict(), before)


def test_the_hint_says_when_the_job_has_the_longer_names():
    ours = nn.ModuleDict({"net": model()})
    with pytest.raises(CheckpointError) as caught:
        plainfile.load_into(ours, model().state_dict(), "weights.pt")
    assert "in the model each name begins with 'net.'" in caught.value.hint


def test_a_new_run_starts_from_the_file_that_its_job_names(tmp_path):
    plainfile.write(model(3).state_dict(), tmp_path / "weights.pt")
    ours, untouched = model(3), model(3)
    with torch.no_grad():
        ours[0].weight.zero_(), untouched[0].weight.zero_()
    plainfile.start(ours, spec.JobSpec(start_from=str(tmp_path / "weights.pt")))
    plainfile.start(untouched, spec.JobSpec())
    assert torch.equal(ours[0].weight, model(3)[0].weight)
    assert not untouched[0].weight.any()
    with pytest.raises(
        CheckpointError, match=r"0\.weight is \[3, 2\] in the file and \[4, 2\] in the model"
    ):
        plainfile.start(model(4), spec.JobSpec(start_from=str(tmp_path / "weights.pt")))


@pytest.mark.parametrize("form", FORMS)
def test_a_write_that_fails_leaves_what_was_there(tmp_path, form):
    path = tmp_path / f"weights.{form}"
    plainfile.write({"a": torch.ones(2)}, path)
    before = path.read_bytes()
    with pytest.raises(UserError, match="cannot be written"):
        plainfile.write({"a": torch.ones(2), "b": Unwritable(torch.ones(2))}, path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    for target in (tmp_path / "nowhere" / path.name, path / path.name, Path("/proc") / path.name):
        with pytest.raises(UserError, match="cannot be written") as caught:
            plainfile.write({"a": torch.ones(2)}, target)
        assert caught.value.where == str(target)


class Unwritable(torch.Tensor):
    def __reduce_ex__(self, protocol):
        raise RuntimeError("no")

    def contiguous(self, *args, **kwargs):
        raise RuntimeError("no")

    def is_contiguous(self, *args, **kwargs):
        raise RuntimeError("no")


@pytest.mark.parametrize("form", FORMS)
def test_others_may_read_it_as_the_umask_says(tmp_path, form):
    before = os.umask(0o027)
    try:
        plainfile.write({"a": torch.ones(2)}, tmp_path / f"weights.{form}")
    finally:
        os.umask(before)
    assert (tmp_path / f"weights.{form}").stat().st_mode & 0o777 == 0o640


def test_a_dtype_that_the_form_does_not_know_is_told(tmp_path):
    wide = {"a": torch.ones(2, dtype=torch.complex128)}
    with pytest.raises(UserError, match="cannot be written"):
        plainfile.write(wide, tmp_path / "weights.safetensors")
    assert not any(tmp_path.iterdir())


def test_without_the_package_only_its_form_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    plainfile.write({"a": torch.ones(2)}, path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.torch")
    for act in (lambda: plainfile.read(path), lambda: plainfile.write({}, path)):
        with pytest.raises(UserError, match="safetensors is not installed") as caught:
            act()
        assert "install the extra `safetensors`" in caught.value.hint
    plainfile.write({"a": torch.ones(2)}, tmp_path / "weights.pt")
    assert plainfile.read(tmp_path / "weights.pt").keys() == {"a"}


def test_an_export_is_read_back_into_a_plain_model(tmp_path):
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    saved = {
        name.removeprefix("model."): tensor
        for name, tensor in dcp_files.read_all(run.checkpoints / "step-2", "model.").items()
    }
    for form in FORMS:
        target = tmp_path / f"model.{form}"
        assert plainfile.export(run, target) == 2
        plain = sys.modules["small_task"].model()
        plainfile.load_into(plain, plainfile.read(target), str(target))
        assert same(plain.state_dict(), saved)
    theirs = sys.modules["small_task"].model()
    theirs.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
