"""ResNet-18 on a folder of images, one folder for each class: fine-tuning, or from scratch.

    ROOT/train/cat/1.jpg    ROOT/train/dog/7.png
    ROOT/val/cat/2.jpg      ROOT/val/dog/9.png

ROOT is a folder, s3://bucket/prefix, or a URL of another store; train and val may hold tar shards.

The model is torchvision's where torchvision is installed and works, else one of the same names,
shapes and first weights, so that torchvision's file of pretrained weights fits both.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from hpcddp.data import ImageFolder
from hpcddp.errors import JobFileError

try:
    from PIL import Image
except ImportError:
    raise JobFileError(
        "images are read with Pillow, which is not here",
        where="jobs/resnet.py",
        hint="pip install 'hpcddp[examples]'",
    ) from None

FOLDERS = {"train": "train", "eval": "val"}
# Of ImageNet's red, green and blue, as pretrained weights expect them.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


def model(classes: int = 2, weights: str = "", freeze: bool = False) -> nn.Module:
    """ResNet-18 (He et al., 2016): [batch, 3, size, size] -> [batch, classes].

    Args:
        classes: 1 or more; as many as the folder has.
        weights: file of pretrained weights, a state_dict; empty for random ones. A last layer for
            another number of classes is not taken from it.
        freeze: train the last layer alone. Batch norms still go by the batch while it trains.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise JobFileError(f"{classes!r} is not a whole number from 1 on", where="model.classes")
    if not isinstance(freeze, bool):
        raise JobFileError(f"{freeze!r} is not true or false", where="model.freeze")
    made = _torchvision(classes) or _own(classes)
    if weights:
        _load(made, Path(str(weights)).expanduser())
    if freeze:
        made.requires_grad_(False)
        made.get_submodule("fc").requires_grad_(True)
    return made


def dataset(split: str, root: str = "", size: int = 224) -> ImageFolder:
    """The images of ROOT/train, cut and mirrored at random, or those of ROOT/val, as they are:
    (image [3, size, size], class [classes] with a 1 at its place). The length of the latter tells
    the loss how many classes there are, without looking at values on a GPU.

    Args:
        root: the folder, or the place in a store, that has train and val in it.
        size: height and width of what the model gets, in pixels; 32 or more.
    """
    if not root:
        raise JobFileError(
            "the folder of images is not named",
            where="dataset.root",
            hint="--set dataset.root=FOLDER or s3://BUCKET/PREFIX; it has train/CLASS/*.jpg and "
            "val/CLASS/*.jpg in it",
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 32:
        raise JobFileError(f"{size!r} is not a whole number from 32 on", where="dataset.size")
    place = str(root).rstrip("/") or "/"
    found = {name: ImageFolder(f"{place}/{folder}") for name, folder in FOLDERS.items()}
    classes, asked = found["train"].classes, found[split]
    if unknown := [name for name in found["eval"].classes if name not in classes]:
        raise JobFileError(
            f"val has the class {unknown[0]}, which train has not",
            where=place,
            hint=f"train has {', '.join(classes[:10])}",
        )
    asked.transform = _Cut(size, training=split == "train")
    asked.target_transform = _OneHot([classes.index(name) for name in asked.classes], len(classes))
    return asked


def loss(output: Tensor, target: Tensor) -> Tensor:
    if output.shape[1] != target.shape[1]:
        raise JobFileError(
            f"the model tells {output.shape[1]} classes apart, but the folder has "
            f"{target.shape[1]}",
            where="model.classes",
            hint=f"set it to {target.shape[1]}",
        )
    return functional.cross_entropy(output, target.to(output.dtype))


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"accuracy": output.argmax(1) == target.argmax(1)}


def blocks(model: nn.Module) -> list[str]:
    return [f"layer{stage}.{i}" for stage in range(1, 5) for i in range(2)]


def parts(model: nn.Module) -> list[str]:
    if not isinstance(model, nn.Sequential):
        raise JobFileError(
            "torchvision's ResNet-18 is no sequence of modules, which a pipeline needs",
            where="strategy",
            hint="take another strategy, or a Python without torchvision: the job then has a "
            "model of its own",
        )
    return ["conv1", "bn1", "relu", "maxpool", *blocks(model), "avgpool", "flatten", "fc"]


class _Cut:
    """A PIL image -> a part of it, float32 [3, size, size]."""

    def __init__(self, size: int, *, training: bool) -> None:
        self._size, self._training = size, training

    def __call__(self, image: Image.Image) -> Tensor:
        box = _random_box(*image.size) if self._training else _middle(*image.size)
        image = image.resize((self._size,) * 2, Image.Resampling.BILINEAR, box)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
        if self._training and torch.rand(()) < 0.5:
            pixels = pixels.flip(2)
        return (pixels - MEAN) / STD


class _OneHot:
    """A folder's number of a class -> train's [classes], with a 1 at its place."""

    def __init__(self, numbers: list[int], classes: int) -> None:
        self._numbers, self._classes = numbers, classes

    def __call__(self, label: int) -> Tensor:
        return functional.one_hot(torch.tensor(self._numbers[label]), self._classes)


class BasicBlock(nn.Module):
    """Two convolutions, and what came in added to them; ``stride`` makes the image smaller."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


def _own(classes: int) -> nn.Sequential:
    """ResNet-18 with torchvision's names, as a sequence."""
    widths = (64, 64, 128, 256, 512)
    stages = {
        f"layer{i}": nn.Sequential(
            BasicBlock(widths[i - 1], widths[i], 1 if i == 1 else 2),
            BasicBlock(widths[i], widths[i], 1),
        )
        for i in range(1, 5)
    }
    made = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
            bn1=nn.BatchNorm2d(64),
            relu=nn.ReLU(),
            maxpool=nn.MaxPool2d(3, stride=2, padding=1),
            **stages,
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, classes),
        )
    )
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return made


def _torchvision(classes: int) -> nn.Module | None:
    """None where it is not installed, or was built for another torch."""
    try:
        from torchvision.models import resnet18
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    made: nn.Module = resnet18(num_classes=classes)
    return made


def _load(model: nn.Module, path: Path) -> None:
    """Put a file's weights into the model; the last layer's only if it has as many classes."""
    found, own = _state(path), model.state_dict()
    last = {name: own[name] for name in ("fc.weight", "fc.bias")}
    if found.keys() >= last.keys() and found["fc.bias"].shape != own["fc.bias"].shape:
        found |= last
    # Files from before torch 0.4.1 do not count the batches.
    missing = [n for n in own if n not in found and not n.endswith("num_batches_tracked")]
    unknown = [n for n in found if n not in own]
    shapes = [n for n in own if n in found and found[n].shape != own[n].shape]
    wrong = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    told = [f"{what}: {_first(names)}" for what, names in wrong.items() if names]
    if told:
        raise JobFileError(
            f"these are not the weights of a ResNet-18 ({'; '.join(told)})",
            where=str(path),
            hint="model.weights wants a file such as torchvision's resnet18-f37072fd.pth",
        )
    model.load_state_dict(own | found)


def _first(names: list[str]) -> str:
    return ", ".join(map(str, names[:3])) + ", ..." * (len(names) > 3)


def _state(path: Path) -> dict[str, Tensor]:
    """A file's tensors by name; nothing in it is executed."""
    hint = "model.weights wants what torch.save(model.state_dict(), FILE) writes"
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise JobFileError(
            f"cannot be read: {error.strerror or error}", where=str(path), hint=hint
        ) from None
    except Exception:  # any, by what bytes are in a foreign file
        raise JobFileError(
            "is no file of weights that can be read without executing what is in it",
            where=str(path),
            hint=hint,
        ) from None
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise JobFileError("is no dict of names and tensors", where=str(path), hint=hint)
    return dict(found)


def _random_box(width: int, height: int) -> Box:
    """8 to 100 % of the image, from 3:4 to 4:3 (Szegedy et al., 2015)."""
    for _ in range(10):
        area = width * height * torch.empty(()).uniform_(0.08, 1).item()
        ratio = math.exp(torch.empty(()).uniform_(math.log(3 / 4), math.log(4 / 3)).item())
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = torch.rand(2, dtype=torch.float64).tolist()
            left, top = left * (width - w), top * (height - h)
            return left, top, left + w, top + h
    return _middle(width, height)


def _middle(width: int, height: int) -> Box:
    """The middle of the image: a square of 7/8 of the shorter side, as 224 of 256 pixels."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
