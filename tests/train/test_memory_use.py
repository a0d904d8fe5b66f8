"""What a rank holds, and the most that its process took."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpcddp.train import memory_use
from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.memory_use import PARTS, MemoryUse, held

CPU = torch.device("cpu")
MEGABYTE = 1 << 20


@pytest.fixture
def live() -> Live:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(module.parameters())
    return Live(module, optimizer, SimpleNamespace(), SimpleNamespace())


def told(made: MemoryUse) -> dict[str, float]:
    return dict(zip(PARTS, made.read(), strict=True))


def test_a_piece_of_memory_counts_once() -> None:
    whole = torch.zeros(100)
    assert held([whole, whole[:10], whole.view(10, 10)]) == 400
    assert held([whole, torch.zeros(5, dtype=torch.float64)]) == 440
    assert held([]) == 0


def test_parts_are_told_apart(live: Live) -> None:
    made = MemoryUse(live, CPU)
    assert [told(made)[part] for part in PARTS[:4]] == [4 * 80, 0, 0, 4 * 16 + 8]
    live.module(torch.ones(2, 8)).sum().backward()
    live.optimizer.step()
    made.look()
    live.optimizer.zero_grad(set_to_none=True)
    assert told(made)["gradients"] == 4 * 80  # they were there
    assert told(made)["optimizer"] == 2 * 4 * 80 + 3 * 4


def test_the_peak_is_what_came_after_and_is_gone_again(live: Live) -> None:
    before = torch.ones(64 * MEGABYTE // 4)
    del before
    made = MemoryUse(live, CPU)
    assert told(made)["peak"] < 8 * MEGABYTE
    torch.ones(40 * MEGABYTE // 4)
    assert 36 * MEGABYTE < told(made)["peak"] < 60 * MEGABYTE


def test_where_the_kernel_tells_nothing_the_peak_is_not_known(
    live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_use, "CLEAR", tmp_path / "nowhere" / "clear_refs")
    assert math.isinf(told(MemoryUse(live, CPU))["peak"])
