"""The newest step that a rank holds whole, from its marks to the tensors of a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hpcddp.errors import CheckpointError
from hpcddp.train.checkpoint.device_steps import DeviceSteps, StepMark
from hpcddp.train.checkpoint.loose_copies import LooseCopies
from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.parallel import state_dict
from hpcddp.train.parallel.optim import own
from hpcddp.train.parallel.state_dict import Parts
from hpcddp.train.rank.spread import Spread

Describe = Callable[[], str]
Suspect = Callable[[int, Callable[[Tensor], float | complex]], bool]


class HeldStep:
    """What one rank holds of its newest step.

    Args:
        describe: makes the meta.json of a checkpoint of the step that is marked.

    Raises:
        Exception: no step of this model or optimizer can be held; of any kind, as a model may save
            anything.
    """

    def __init__(self, live: Live, spread: Spread, describe: Describe) -> None:
        self._live, self._spread, self._describe = live, spread, describe
        self._loose = LooseCopies(
            live.module, live.more, own(live.optimizer), divided=spread.divided
        )
        self._steps = DeviceSteps(spread.world.device, live.optimizer)
        self.ahead = self._steps.ahead
        self._loose.take()
        self._parts(StepMark(0, copies=self._loose.copies))

    @property
    def has_buffers(self) -> bool:
        """Whether the model has any that are saved."""
        return len(self._loose) > 0

    def change(self) -> None:
        """Note that the optimizer changes the weights from now on. All ranks have the same buffers,
        if they level them."""
        if self._loose:  # a step of a small model must not notice this
            self._loose.note()
        self._steps.change()

    def mark(self, step: int) -> None:
        """Note that a step is complete, and keep what the next forward pass changes.

        Raises:
            KeyError: the script has changed the model.
        """
        level = not self._loose or self._loose.as_noted()
        self._loose.take()
        self._steps.mark(step, self._loose.copies, level, self._describe)

    def forget(self) -> None:
        """Note that a change has begun that may not be completed."""
        self._steps.forget()

    def newest(self, suspect: Suspect) -> StepMark | None:
        """The newest step, if it is whole and its numbers are good.

        Args:
            suspect: whether a loss until a step is bad; it is given what reads a number.
        """
        mark = self._steps.newest()
        with contextlib.suppress(Exception), self._steps.aside():  # of a model that was changed
            if mark and not suspect(mark.step, self._steps.number) and self._is_sound(mark):
                return mark
        return None

    def _is_sound(self, mark: StepMark) -> bool:
        """Whether the tensors are those of a step. On a GPU, their numbers are looked at later."""
        parts, last = self._parts(mark), self._steps.is_last(mark)
        if self.ahead and not last:  # what is not on the GPU is of a later step
            there = all(t.is_cuda or id(t) in mark.counters for t in parts.mine.values())
            there = there and all(copy.is_cuda for copy in mark.copies.values())
            there = there and not parts.plain and not self._live.more and self._loose.known(parts)
            return there and self._loose.untouched(self._steps.number)
        good = self.ahead or self._loose.finite(parts)
        return good and self._loose.known(parts) and self._loose.same()

    def _parts(self, mark: StepMark) -> Parts:
        return self._loose.parts(self._live.optimizer, self._spread.holders, mark.copies)

    def content(self, mark: StepMark) -> tuple[Parts, dict[str, Tensor], dict[str, Any]]:
        """All tensors of a step, those that this rank writes, and the meta.

        Raises:
            CheckpointError: the device has gone on, or has numbers that are not finite.
        """
        parts = self._parts(mark)
        tensors = self._steps.on_host(parts.mine, mark)
        if self._live.more:
            with self._steps.aside():
                tensors |= state_dict.pack(self._live.more)
        if self.ahead:
            stepped = {name: tensors[name] for name in parts.stepped if name in tensors}
            if not (self._steps.holds(mark) and self._loose.finite(Parts(stepped=stepped))):
                raise CheckpointError("the step is not whole, or its numbers are not finite")
        return parts, tensors, json.loads(mark.meta or self._describe())

    def require_same(self) -> None:
        """Check that the loop, which may still run, has not changed what was written; on a GPU,
        copies were.

        Raises:
            CheckpointError: it has.
        """
        if not (self.ahead or self._loose.same()):
            raise CheckpointError("the script has changed its model meanwhile")


def can_hold(live: Live, device: torch.device) -> bool:
    """Whether a step of these objects can be held. What a GPU has of the numbers in a meta would
    have to be waited for at each step."""
    if device.type == "cuda":
        options = (value for group in live.optimizer.param_groups for value in group.values())
        if live.scaler.is_enabled() or any(isinstance(value, Tensor) for value in options):
            return False
    return live.alike and device.type in ("cpu", "cuda")
