"""ResNet-18 on images in one folder per class: fine-tuning, or training from scratch.

    ROOT/train/cat/1.jpg    ROOT/train/dog/7.png
    ROOT/val/cat/2.jpg      ROOT/val/dog/9.png

ROOT is a folder, s3://bucket/prefix, or a URL of another store; train and val may contain tar
shards.

The model is torchvision's where torchvision is installed and works. Otherwise it is a model with
the same names, shapes and initial weights. Torchvision's file of pretrained weights fits both.
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
        "Pillow is not installed; the job needs it to read images",
        where="jobs/resnet.py",
        hint="install the extra `examples` of hpcddp: pip install '.[examples]' in its clone",
    ) from None

FOLDERS = {"train": "train", "eval": "val"}
# Mean and standard deviation of ImageNet's red, green and blue, as for pretrained weights.
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels


def model(classes: int = 2, weights: str = "", freeze: bool = False) -> nn.Module:
    """ResNet-18 (He et al., 2016): images [batch, 3, size, size] -> logits [batch, classes].

    Args:
        classes: Number of classes in the folder, at least 1.
        weights: File of pretrained weights (a state_dict); empty for random weights. A last layer
            for another number of classes is not loaded.
        freeze: Train only the last layer. Batch norms still use the statistics of the batch.

    Raises:
        JobFileError: An argument is out of range, or the file does not fit the model.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        what = f"expected a whole number of at least 1, got {classes!r}"
        raise JobFileError(what, where="model.classes")
    if not isinstance(freeze, bool):
        raise JobFileError(f"expected true or false, got {freeze!r}", where="model.freeze")
    made = _torchvision(classes) or _own(classes)
    if weights:
        _load(made, Path(str(weights)).expanduser())
    if freeze:
        made.requires_grad_(False)
        made.get_submodule("fc").requires_grad_(True)
    return made


def dataset(split: str, root: str = "", size: int = 224) -> ImageFolder:
    """The images of ROOT/train ("train") or ROOT/val ("eval"): (image, class).

    Images are float32 [3, size, size]; training images are cropped and mirrored at random. Classes
    are one-hot, int64 [classes]: so the loss can check the number of classes without reading values
    from a GPU.

    Args:
        split: "train" or "eval".
        root: Folder or URL that contains train and val.
        size: Height and width of the images for the model in pixels, at least 32.

    Raises:
        JobFileError: An argument is missing or out of range, or val has a class that train has not.
        UserError, StoreUnreachable: As ``hpcddp.data.ImageFolder``.
    """
    if not root:
        raise JobFileError(
            "no folder of images is set",
            where="dataset.root",
            hint="add --set dataset.root=FOLDER (or s3://BUCKET/PREFIX) with train/CLASS/*.jpg and "
            "val/CLASS/*.jpg in it",
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 32:
        what = f"expected a whole number of at least 32, got {size!r}"
        raise JobFileError(what, where="dataset.size")
    place = str(root).rstrip("/") or "/"
    found = {name: ImageFolder(f"{place}/{folder}") for name, folder in FOLDERS.items()}
    classes, asked = found["train"].classes, found[split]
    if unknown := [name for name in found["eval"].classes if name not in classes]:
        raise JobFileError(
            f"class {unknown[0]!r} of val is not in train",
            where=place,
            hint=f"train has the classes {', '.join(classes[:10])}",
        )
    asked.transform = _Cut(size, training=split == "train")
    asked.target_transform = _OneHot([classes.index(name) for name in asked.classes], len(classes))
    return asked


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, classes] and one-hot classes, in nats (a scalar).

    Raises:
        JobFileError: ``model.classes`` is not the number of classes of the folder.
    """
    if output.shape[1] != target.shape[1]:
        raise JobFileError(
            f"expected {target.shape[1]} classes, as the folder has, got {output.shape[1]}",
            where="model.classes",
            hint=f"set it to {target.shape[1]}",
        )
    return functional.cross_entropy(output, target.to(output.dtype))


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Whether each sample is classified correctly: [batch]."""
    return {"accuracy": output.argmax(1) == target.argmax(1)}


def blocks(model: nn.Module) -> list[str]:
    """The modules that fsdp shards one by one."""
    return [f"layer{stage}.{i}" for stage in range(1, 5) for i in range(2)]


def parts(model: nn.Module) -> list[str]:
    """The modules whose sequence is the model, for pipeline stages.

    Raises:
        JobFileError: The model is torchvision's, which is not a sequence.
    """
    if not isinstance(model, nn.Sequential):
        raise JobFileError(
            "torchvision's ResNet-18 is not a sequence of modules, as a pipeline needs",
            where="strategy",
            hint="use another strategy, or a Python without torchvision: the job then uses its own "
            "model, which is a sequence",
        )
    return ["conv1", "bn1", "relu", "maxpool", *blocks(model), "avgpool", "flatten", "fc"]


class _Cut:
    """A PIL image -> a crop of it, normalized, float32 [3, size, size]."""

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
    """A class number of one folder -> a one-hot vector of train's classes, int64 [classes]."""

    def __init__(self, numbers: list[int], classes: int) -> None:
        self._numbers, self._classes = numbers, classes

    def __call__(self, label: int) -> Tensor:
        return functional.one_hot(torch.tensor(self._numbers[label]), self._classes)


class BasicBlock(nn.Module):
    """Two convolutions with a shortcut; a ``stride`` of 2 halves height and width."""

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
    """ResNet-18 with torchvision's module names, as a sequence."""
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
    """torchvision's model; None where torchvision is missing, or was built for another torch."""
    try:
        from torchvision.models import resnet18
    except (ImportError, OSError, RuntimeError, AttributeError):
        return None
    made: nn.Module = resnet18(num_classes=classes)
    return made


def _load(model: nn.Module, path: Path) -> None:
    """Load a file's weights; the last layer's only for the same number of classes."""
    found, own = _state(path), model.state_dict()
    last = {name: own[name] for name in ("fc.weight", "fc.bias")}
    if found.keys() >= last.keys() and found["fc.bias"].shape != own["fc.bias"].shape:
        found |= last
    # Files from before torch 0.4.1 have no num_batches_tracked.
    missing = [n for n in own if n not in found and not n.endswith("num_batches_tracked")]
    unknown = [n for n in found if n not in own]
    shapes = [n for n in own if n in found and found[n].shape != own[n].shape]
    wrong = {"missing": missing, "unknown": unknown, "of another shape": shapes}
    told = [f"{what}: {_first(names)}" for what, names in wrong.items() if names]
    if told:
        raise JobFileError(
            f"the weights do not fit ResNet-18 ({'; '.join(told)})",
            where=str(path),
            hint="model.weights requires a file such as torchvision's resnet18-f37072fd.pth",
        )
    model.load_state_dict(own | found)


def _first(names: list[str]) -> str:
    return ", ".join(map(str, names[:3])) + ", ..." * (len(names) > 3)


def _state(path: Path) -> dict[str, Tensor]:
    """A file's tensors by name. No code in the file is executed."""
    hint = "model.weights requires a file of torch.save(model.state_dict(), FILE)"
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise JobFileError(
            f"cannot read: {error.strerror or error}", where=str(path), hint=hint
        ) from None
    except Exception:  # a foreign file can cause any
        raise JobFileError(
            "not a file of weights that can be read without executing code",
            where=str(path),
            hint=hint,
        ) from None
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise JobFileError("not a dict of names and tensors", where=str(path), hint=hint)
    return dict(found)


def _random_box(width: int, height: int) -> Box:
    """A random crop of 8% to 100% of the area, from 3:4 to 4:3 (Szegedy et al., 2015)."""
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
    """The center of the image: a square of 7/8 of the shorter side (224 of 256 pixels)."""
    side = min(width, height) * 7 / 8
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side
