"""The task of `leave` and `goodput`: a step as long, and weights as large, as asked for."""

import time
from typing import Any

import torch
from torch import Tensor, nn


def model(width: int = 256) -> nn.Module:
    """One square layer; with AdamW's state a checkpoint has 12 bytes for each weight."""
    return nn.Linear(width, width)


def dataset(split: str, width: int = 256, pause: float = 0.2) -> Any:
    """1,000 samples, all the same, each of which takes `pause` seconds; none are held out."""
    return Pausing(width, pause) if split == "train" else None


class Pausing(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, width: int, pause: float) -> None:
        self.sample, self.pause = torch.ones(width), pause

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.pause)
        return self.sample, self.sample


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)
