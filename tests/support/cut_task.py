"""Tasks and a model for the tests of how models are cut."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpcddp.spec import JobSpec
from hpcddp.train.rank.task_module import Task


def task(**functions: Any) -> Task:
    """A task that says these things of its model's structure."""
    needed = {name: lambda *args, **options: None for name in ("model", "dataset", "loss")}
    return Task(SimpleNamespace(**needed, **functions), "task.py", JobSpec())


class Two(nn.Module):
    """Two layers, and no word about what follows what."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out
