"""The task of `leave` and `goodput`, with a chosen length of steps and size of weights."""

import time
from typing import Any

import torch
from torch import Tensor, nn


def model(width: int = 256) -> nn.Module:
    """One square layer. With AdamW's state a checkpoint has 12 bytes per weight."""
    return nn.Linear(width, width)


def dataset(split: str, width: int = 256, pause: float = 0.2) -> Any:
    """1,000 equal samples, each of which takes `pause` seconds; no evaluation data."""
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
