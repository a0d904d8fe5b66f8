"""Resumes a loader that reads one batch ahead, with the random numbers of an undisturbed epoch.

Accelerate's loaders read batch b + 1 before they pass on batch b. A dataset or a collator may draw
random numbers as it is read, and a sampler when an epoch starts. So a checkpoint after batch b has
three states of the generators: those of the epoch's start, of the moment before batch b + 1 was
read, and of the save. A resume starts the epoch's iterator from the first, reads batch b + 1 from
the second, and goes on from the third.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hpcddp.train.input import seeding
from hpcddp.train.input.seeding import Generators

_ALL = ("torch", "python", "numpy")
State = dict[str, Tensor]


class ReadAhead:
    """The batch sampler of a loader, which sees each batch before it is read.

    Processes of the loader draw numbers of their own. Then only the epoch's start and the save
    matter.

    Args:
        loader: has a batch sampler.
        device: of the rank.
    """

    def __init__(self, loader: Any, device: torch.device) -> None:
        base = getattr(loader, "base_dataloader", loader)
        self._inner: Any = base.batch_sampler
        self._device, self._here, self._epoch = device, not base.num_workers, 0
        self._owners = loader, base, _sampler(base.batch_sampler)
        self._start: State | None = None  # of this epoch
        self._before: dict[int, Generators] = {}  # by batch
        self._resume: dict[str, State] | None = None  # until the state of the save is restored
        self._first = 0  # batch that the epoch starts with
        vars(base)["batch_sampler"] = self  # torch refuses to set it

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        if set_epoch := getattr(_sampler(self._inner), "set_epoch", None):
            set_epoch(self._epoch)  # Accelerate does not reach it behind skipped batches
        for number, batch in enumerate(self._inner):
            if self._here:
                self._meet(number)
            yield batch

    def _meet(self, number: int) -> None:
        """Remember, or restore, the state before a batch is read."""
        if self._resume and number == self._first:
            seeding.set_rng_state(self._resume["before"], self._device)
        elif self._resume and number == self._first + 1:
            self.go_on()
        if number >= self._first:
            self._before[number] = Generators()
            self._before.pop(number - 2, None)

    def begin(self, epoch: int) -> None:
        """Note the start of an epoch, or restore the resumed one's; before its first batch."""
        self._epoch, self._before = epoch, {}
        if self._resume:
            seeding.set_rng_state(self._resume["start"], self._device)
            for name, generator in self._generators().items():
                if (state := self._resume["start"].get(f"generator.{name}")) is not None:
                    generator.set_state(state)
        if not self._first:
            self._resume = None
        self._start = self._packed(None)

    def go_on(self) -> None:
        """Continue from the state of the save, if that has not happened."""
        if self._resume:
            seeding.set_rng_state(self._resume["now"], self._device)
            self._resume, self._first = None, 0

    def states(self, used: int) -> dict[str, State]:
        """The states for a checkpoint.

        Args:
            used: batches of the epoch that the steps have used; 0 before an epoch.
        """
        start = self._start if used and self._start else self._packed(None)
        before = self._packed(self._before.get(used))
        return {"start": start, "before": before, "now": seeding.rng_state(self._device)}

    def resume(self, states: dict[str, State], used: int) -> None:
        """Let the next epoch begin after its used batches."""
        self._resume, self._first = states, used

    def _packed(self, generators: Generators | None) -> State:
        """A state as tensors; None is the current one."""
        with seeding.untouched(self._device):
            if generators:
                generators.restore(_ALL)
            state = seeding.rng_state(self._device)
        own = {f"generator.{n}": g.get_state() for n, g in self._generators().items()}
        return state | own

    def _generators(self) -> dict[str, torch.Generator]:
        """The generators that a loader or sampler has of its own."""
        names = ("generator", "synchronized_generator")
        own = {
            f"{i}.{name}": getattr(owner, name, None)
            for i, owner in enumerate(self._owners)
            for name in names
        }
        return {name: g for name, g in own.items() if isinstance(g, torch.Generator)}


def _sampler(batches: Any) -> Any:
    """The sampler of a batch sampler; Accelerate wraps that in a shard."""
    while inner := getattr(batches, "batch_sampler", None):
        batches = inner
    return getattr(batches, "sampler", None)
