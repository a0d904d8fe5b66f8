"""A small CNN for handwritten digits of 8 x 8 pixels, from a data file of scikit-learn.

The file is read directly, because an import of scikit-learn takes longer than a training epoch.
"""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hpcddp.errors import JobFileError

HELD_OUT = 360  # of 1,797 samples


def model(width: int = 24, dropout: float = 0.4) -> nn.Module:
    """Two convolutions and two linear layers: images [batch, 1, 8, 8] -> logits [batch, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(32 * width, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def dataset(split: str) -> TensorDataset:
    """1,437 samples for "train" or 360 for "eval": (image [1, 8, 8], class from 0 to 9).

    Pixels are float32 from 0 to 1. The split does not depend on the seed.
    """
    with gzip.open(_data_file(), "rt") as f:
        rows = np.loadtxt(f, delimiter=",", dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(rows))
    chosen = rows[order[:HELD_OUT] if split == "eval" else order[HELD_OUT:]]
    images = torch.from_numpy(chosen[:, :-1]).reshape(-1, 1, 8, 8) / 16
    return TensorDataset(images, torch.from_numpy(chosen[:, -1]).long())


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, 10] and classes [batch], in nats (a scalar)."""
    return nn.functional.cross_entropy(output, target)


def metrics(output: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Whether each sample is classified correctly: [batch]."""
    return {"accuracy": output.argmax(1) == target}


def _data_file() -> Path:
    found = importlib.util.find_spec("sklearn")  # finds the package without importing it
    for folder in (found and found.submodule_search_locations) or []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise JobFileError(
        "the data file is missing: it comes with scikit-learn",
        where="jobs/digits.py",
        hint="install the extra `examples` of hpcddp: pip install '.[examples]' in its clone",
    )
