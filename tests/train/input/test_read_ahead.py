"""A loader that reads ahead resumes with the random numbers of an undisturbed epoch."""

import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader, Dataset

from hpcddp.train.input import loaders
from hpcddp.train.input.read_ahead import ReadAhead

CPU = torch.device("cpu")


class Drawing(Dataset):
    """Draws from all generators as it is read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> float:
        return i + 0.1 * (float(torch.rand(())) + random.random() + np.random.rand())


def made() -> tuple[DataLoader, ReadAhead]:
    """Its sampler draws too, as an epoch starts."""
    loader = DataLoader(Drawing(), batch_size=3, shuffle=True)
    return loader, ReadAhead(loader, CPU)


def ahead_of(loader: DataLoader) -> Iterator[Any]:
    """The batches as Accelerate's loaders pass them on."""
    batches = iter(loader)
    current = next(batches)
    for following in batches:
        yield current
        current = following
    yield current


def trained(batches: Iterator[Any]) -> list[tuple[list[float], float]]:
    """Each batch, and what the step on it draws."""
    return [(batch.tolist(), float(torch.rand(()))) for batch in batches]


@pytest.mark.parametrize("used", [1, 2, 3])
def test_a_resume_draws_what_the_epoch_would_have_drawn(used: int) -> None:
    torch.manual_seed(3)
    loader, ahead = made()
    ahead.begin(0)
    batches = ahead_of(loader)
    trained(next(batches) for _ in range(used))
    states = ahead.states(used)
    rest = trained(batches)
    assert len(rest) == 4 - used

    torch.manual_seed(99)
    loader, ahead = made()
    ahead.resume(states, used)
    ahead.begin(0)
    batches = ahead_of(skip_first_batches(loader, used))
    first = next(batches)
    ahead.go_on()
    assert trained(iter([first])) + trained(batches) == rest


def test_the_next_epoch_follows_as_if_undisturbed() -> None:
    torch.manual_seed(3)
    loader, ahead = made()
    ahead.begin(0)
    trained(ahead_of(loader))
    states = ahead.states(0)
    ahead.begin(1)
    second = trained(ahead_of(loader))

    torch.manual_seed(99)
    loader, ahead = made()
    ahead.resume(states, 0)
    ahead.begin(1)
    assert trained(ahead_of(loader)) == second


class Asked(Dataset):
    """Whether the process that reads ignores a stop signal."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> bool:
        return signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_processes_of_a_wrapped_loader_ignore_stop_signals() -> None:
    """Accelerate starts those of the loader inside."""
    loader = DataLoaderShard(Asked(), batch_size=2, num_workers=1)
    loaders.keep_workers(loader)
    assert [batch.tolist() for batch in loader] == [[True, True]]
