"""The shipped job resnet: torchvision's names and weights, and a folder of images."""

import random
import sys
from importlib import import_module

import numpy as np
import pytest
import torch
from PIL import Image
from ranks import make_run, one_rank, records

from hpcddp import spec
from hpcddp.errors import JobFileError, UserError
from hpcddp.planning import jobfile, resources
from hpcddp.train.rank import task_module

pytestmark = pytest.mark.usefixtures("one_thread")
resnet = import_module("hpcddp.jobs.resnet")
LAST = ["fc.weight", "fc.bias"]


def norm(name, width):
    sizes = {"weight": (width,), "bias": (width,), "running_mean": (width,),
             "running_var": (width,), "num_batches_tracked": ()}  # fmt: skip
    return {f"{name}.{key}": size for key, size in sizes.items()}


def torchvisions(classes):
    """Names and shapes in torchvision's state_dict, in its order."""
    found = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    before = 64
    for stage, width in enumerate((64, 128, 256, 512), 1):
        for i in range(2):
            block = f"layer{stage}.{i}"
            found |= {f"{block}.conv1.weight": (width, before, 3, 3), **norm(f"{block}.bn1", width)}
            found |= {f"{block}.conv2.weight": (width, width, 3, 3), **norm(f"{block}.bn2", width)}
            if before != width:
                found |= {f"{block}.downsample.0.weight": (width, before, 1, 1)}
                found |= norm(f"{block}.downsample.1", width)
            before = width
    return found | {"fc.weight": (classes, 512), "fc.bias": (classes,)}


@pytest.fixture(autouse=True)
def no_torchvision(monkeypatch):
    """Whether it is installed or not."""
    monkeypatch.setitem(sys.modules, "torchvision.models", None)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A file as torchvision's, of 5 classes."""
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("weights") / "resnet18.pth"
    torch.save(resnet._own(5).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of 32 x 32 pixels: the one is rather red, the other rather blue."""
    root = tmp_path_factory.mktemp("images")
    draw = np.random.default_rng(0)
    for split, each in (("train", 12), ("val", 4)):
        for channel, name in ((0, "red"), (2, "blue")):
            (root / split / name).mkdir(parents=True)
            for i in range(each):
                pixels = draw.integers(0, 120, (32, 32, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                suffix = ("png", "JPG")[i % 2]
                Image.fromarray(pixels).save(root / split / name / f"{i:02}.{suffix}")
    return root


def test_names_shapes_and_order_are_torchvisions():
    own = resnet.model(classes=7)
    found = {name: tuple(value.shape) for name, value in own.state_dict().items()}
    assert list(found.items()) == list(torchvisions(7).items())
    assert (len(found), len(list(own.parameters())), len(list(own.buffers()))) == (122, 62, 60)


def test_first_weights_keep_the_size_of_what_goes_backward():
    """He et al., 2015: the variance is 2 over the outputs' number, kernel included."""
    torch.manual_seed(0)
    for name, weight in resnet.model().named_parameters():
        if weight.dim() == 4:
            wanted = (2 / (weight.shape[0] * weight.shape[2] ** 2)) ** 0.5
            assert weight.std().item() == pytest.approx(wanted, rel=0.05), name


def test_its_parts_one_after_the_other_are_the_model():
    made = resnet.model(classes=3)
    names = resnet.parts(made)
    assert [n for n in names if "." in n] == resnet.blocks(made)
    assert all(type(made.get_submodule(n)) is resnet.BasicBlock for n in resnet.blocks(made))
    x = output = torch.randn(2, 3, 64, 64)
    made.eval()
    for name in names:
        output = made.get_submodule(name)(output)
    assert torch.equal(output, made(x)) and output.shape == (2, 3)
    held = [p for name in names for p in made.get_submodule(name).state_dict()]
    assert len(held) == 122


def test_pretrained_weights_are_taken_from_a_path(pretrained):
    found, file = resnet.model(classes=5, weights=str(pretrained)), torch.load(pretrained)
    assert all(torch.equal(found.state_dict()[name], value) for name, value in file.items())


def test_a_last_layer_for_other_classes_is_left_fresh(pretrained):
    torch.manual_seed(1)
    fresh = resnet.model(classes=2).state_dict()
    torch.manual_seed(1)
    found = resnet.model(classes=2, weights=str(pretrained)).state_dict()
    file = torch.load(pretrained)
    for name, value in found.items():
        assert torch.equal(value, (fresh if name in LAST else file)[name]), name


def test_a_file_from_before_batches_were_counted_is_taken(pretrained, tmp_path):
    file = {n: v for n, v in torch.load(pretrained).items() if not n.endswith("tracked")}
    torch.save(file, tmp_path / "old.pth")
    found = resnet.model(classes=5, weights=str(tmp_path / "old.pth")).state_dict()
    assert torch.equal(found["layer4.1.bn2.running_var"], file["layer4.1.bn2.running_var"])


def without(file, name):
    return {n: v for n, v in file.items() if n != name}


BAD_WEIGHTS = {
    "a layer less": (lambda f: without(f, "bn1.bias"), "missing: bn1.bias"),
    "no last layer": (lambda f: without(f, "fc.bias"), "missing: fc.bias"),
    "a wrapper's names": (
        lambda f: {f"module.{n}": v for n, v in f.items()},
        "missing: conv1.weight, .*, ...; unknown: module.conv1.weight, ",
    ),
    "another shape": (
        lambda f: f | {"conv1.weight": torch.zeros(64, 3, 3, 3)},
        r"of another shape: conv1.weight\)",
    ),
    "a list": (lambda f: [1, 2], "not a dict of names and tensors"),
    "a whole checkpoint": (lambda f: {"model": f, "epoch": 3}, "not a dict of names and tensors"),
    "code": (lambda f: resnet.BasicBlock(1, 1, 1), "without executing"),
}


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_a_file_of_other_weights_is_refused_with_the_first_names(pretrained, tmp_path, kind):
    change, told = BAD_WEIGHTS[kind]
    torch.save(change(torch.load(pretrained)), tmp_path / "bad.pth")
    with pytest.raises(JobFileError, match=told) as error:
        resnet.model(classes=5, weights=str(tmp_path / "bad.pth"))
    assert error.value.where == str(tmp_path / "bad.pth")


def test_a_file_that_holds_no_weights_is_refused(tmp_path):
    (tmp_path / "text.pth").write_text("hello\n")
    (tmp_path / "empty.pth").touch()
    for name, told in (("text", "not a file"), ("empty", "not a file"), ("none", "No such file")):
        with pytest.raises(JobFileError, match=told):
            resnet.model(weights=str(tmp_path / f"{name}.pth"))


def test_frozen_the_last_layer_alone_learns():
    found = resnet.model(freeze=True)
    assert [name for name, p in found.named_parameters() if p.requires_grad] == LAST


@pytest.mark.parametrize("options", [{"classes": 0}, {"classes": "2"}, {"freeze": "no"}])
def test_options_that_make_no_model_are_refused(options):
    with pytest.raises(JobFileError) as error:
        resnet.model(**options)
    assert error.value.where == f"model.{next(iter(options))}"


TORCHVISION = """
from torch import nn
class ResNet(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.fc = nn.Linear(512, num_classes)
resnet18 = ResNet
"""


@pytest.mark.parametrize("text", [TORCHVISION, "raise RuntimeError('operator does not exist')"])
def test_torchvision_is_taken_where_it_works(tmp_path, monkeypatch, text):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").touch()
    (tmp_path / "torchvision" / "models.py").write_text(text)
    for name in ("torchvision", "torchvision.models"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    found = resnet.model(classes=4)
    for name in ("torchvision", "torchvision.models"):
        sys.modules.pop(name, None)
    if text != TORCHVISION:
        assert len(resnet.parts(found)) == 15
        return
    assert found.fc.out_features == 4 and len(found.state_dict()) == 2
    with pytest.raises(JobFileError, match="a pipeline needs"):
        resnet.parts(found)


def test_files_and_classes_come_in_the_order_of_their_names(folder, tmp_path):
    (tmp_path / "train").symlink_to(folder / "train")
    for name in ("red", "blue"):
        (tmp_path / "val" / name).mkdir(parents=True)
        for file in (folder / "val" / name).iterdir():
            (tmp_path / "val" / name / file.name).symlink_to(file)
    for stranger in ("red/notes.txt", "red/.hidden.png", "README.md"):
        (tmp_path / "val" / stranger).write_text("no image")
    (tmp_path / "val" / ".ipynb_checkpoints").mkdir()
    found = resnet.dataset("eval", str(tmp_path), size=40)
    labels = [found[i][1].tolist() for i in range(len(found))]
    assert labels == [[1, 0]] * 4 + [[0, 1]] * 4  # blue, then red
    image = found[0][0] * resnet.STD + resnet.MEAN
    assert image.shape == (3, 40, 40) and image.dtype == torch.float32
    assert image[2].mean() > 0.6 > 0.4 > image[0].mean()
    assert torch.equal(found[0][0], found[0][0])


def test_training_images_are_drawn_from_torchs_generator_alone(folder):
    found = resnet.dataset("train", str(folder), size=32)
    torch.manual_seed(3)
    first, other = found[0][0], found[0][0]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(3)
    assert torch.equal(found[0][0], first) and not torch.equal(other, first)


def test_a_crop_is_inside_of_the_image_and_of_its_middle_without_chance(tmp_path):
    torch.manual_seed(0)
    for width, height in ((1, 1), (500, 20), (333, 499)):
        boxes = [resnet._random_box(width, height) for _ in range(300)]
        assert all(0 <= a < c <= width + 1e-9 and 0 <= b < d <= height + 1e-9
                   for a, b, c, d in boxes)  # fmt: skip
        parts = [(c - a) * (d - b) / (width * height) for a, b, c, d in boxes]
        assert width == 500 or (min(parts) < 0.2 and max(parts) > 0.8)
    assert resnet._middle(512, 256) == (144, 16, 368, 240)


BROKEN = {
    "a text": lambda file: file.write_text("no image"),
    "half of an image": lambda file: file.write_bytes(file.read_bytes()[:900]),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_image_that_cannot_be_read_is_named(tmp_path, kind):
    files = [tmp_path / split / "a" / "1.png" for split in ("train", "val")]
    for file in files:
        file.parent.mkdir(parents=True)
        Image.effect_noise((40, 40), 50).save(file)
    found = resnet.dataset("train", str(tmp_path))
    BROKEN[kind](files[0])
    with pytest.raises(UserError, match=r"invalid image|cannot read") as error:
        found[0]
    assert error.value.where == str(files[0])


@pytest.mark.parametrize(
    "files, told",
    [
        ([], "train: not found"),
        (["train/a/1.jpg"], "val: not found"),
        (["train/1.jpg", "val/a/1.jpg"], "train: no class folders found"),
        (
            ["train/a/1.jpg", "train/b/1.txt", "val/a/1.jpg"],
            "train/b: no images in this class folder",
        ),
        (["train/a/1.jpg", "val/b/1.jpg"], "class 'b' of val is not in train"),
    ],
)
def test_a_folder_that_is_not_as_it_must_be_is_told_before_the_training(tmp_path, files, told):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=told) as error:
        resnet.dataset("train", str(tmp_path))
    assert str(tmp_path) in error.value.where


def test_a_folder_or_a_size_that_is_missing_is_told(folder):
    with pytest.raises(JobFileError, match=r"--set dataset\.root=FOLDER"):
        resnet.dataset("train")
    for size in (0, 31, 40.0, True):
        with pytest.raises(JobFileError, match="at least 32, got"):
            resnet.dataset("train", str(folder), size)


def test_another_number_of_classes_than_the_folder_has_is_told(folder):
    _, target = resnet.dataset("eval", str(folder))[0]
    with pytest.raises(JobFileError, match="expected 2 classes, as the folder has, got 3") as error:
        resnet.loss(torch.zeros(1, 3), target[None])
    assert error.value.hint == "set it to 2"


def test_loss_and_accuracy_are_those_of_the_classes_numbers():
    output = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    target = torch.nn.functional.one_hot(labels, 3)
    wanted = torch.nn.functional.cross_entropy(output, labels)
    torch.testing.assert_close(resnet.loss(output, target), wanted)
    accuracy = resnet.metrics(output, target)["accuracy"]
    assert torch.equal(accuracy, output.argmax(1) == labels) and accuracy.dtype == torch.bool


def test_the_shipped_job_fits_its_task(folder):
    layer = jobfile.file_layer(resources.folder("jobs") / "resnet.toml")
    job = spec.KEYS.build(layer.values | {"dataset.root": str(folder)})
    found = task_module.load(job, ".")
    made = found.model()
    x, target = found.dataset("train")[0]
    assert x.shape == (3, 224, 224) and made.eval()(x[None]).shape == target[None].shape
    assert len(found.cut("blocks", made)) == 8 and len(found.cut("parts", made)) == 15


def test_it_learns_two_classes_of_small_images(folder, pretrained, tmp_path):
    text = (resources.folder("jobs") / "resnet.py").read_text()
    options = {"dataset__root": str(folder), "dataset__size": 32, "model__classes": 2,
               "model__weights": str(pretrained)}  # fmt: skip
    run = make_run(tmp_path, text, max_steps=0, epochs=3, global_batch=8, train__lr=1e-3,
                   train__eval_every=0, checkpoint__every=0, checkpoint__best="accuracy",
                   checkpoint__best_mode="max", **options)  # fmt: skip
    assert one_rank(run) == "done"
    losses = [r["loss"] for r in records(run, "train")]
    assert len(losses) == 9 and sum(losses[-3:]) < 0.7 * sum(losses[:3])
    assert records(run, "eval")[-1]["metrics"]["accuracy"] > 0.8
