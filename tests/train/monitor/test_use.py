"""How busy a GPU is, as its driver tells: without a GPU."""

import importlib
import math

import pytest
import torch

from hpcddp.train.monitor import timing

GPU = torch.device("cuda", 0)


def test_torch_has_what_it_asks_a_driver_with() -> None:
    assert hasattr(importlib.import_module("pynvml"), "nvmlDeviceGetUtilizationRates")


def test_a_driver_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOOK_SECONDS", 0.0)
    answers = iter([40, RuntimeError("unknown error"), 60])

    def ask(device: torch.device) -> float:
        assert device == GPU
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    use = timing._Use(GPU, ask)
    assert use.look() == 40
    assert math.isnan(use.look())
    assert use.look() == 60


def test_without_what_asks_it_nobody_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LOOK_SECONDS", 0.0)
    asked = []

    def ask(device: torch.device) -> float:
        asked.append(device)
        raise ModuleNotFoundError("nvidia-ml-py")

    use = timing._Use(GPU, ask)
    assert math.isnan(use.look()) and math.isnan(use.look())
    assert asked == [GPU]
