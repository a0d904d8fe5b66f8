"""The newest step that a rank's device has completed: Python's counter may be ahead of it.

On a GPU, Python puts the work of a step into a stream and goes on. If another rank is lost, the
device waits in a collective for ever, and the steps behind it never happen. So each step leaves two
events in the stream: before the optimizer changes the weights, and when the step is complete. While
the next change has not begun, the device's memory is that of one step.

Nothing here waits for the training's stream. A copy has a stream of its own, and goes through
pinned memory that was made at the start; it starts no kernel, as CUDA may load one only once the
device stands still. (CUDA C++ Programming Guide, "Implicit Synchronization" and "Lazy Loading")
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpcddp.errors import CheckpointError

BOUNCE = 1 << 25  # bytes of pinned memory
QUIET = 0.2  # seconds without a new step after which the device stands still
LOOK = 0.01


class StepMark(NamedTuple):
    """A complete step.

    Args:
        meta: that of its checkpoint; "" where it can still be made.
        copies: of what a forward pass changes, by name.
        level: no forward pass has changed it since the ranks made it the same.
        counters: the numbers that the optimizer keeps on the host, by the id of their tensor.
        began, done: the events before its change of the weights, and behind it.
    """

    step: int
    meta: str = ""
    copies: Mapping[str, Tensor] = MappingProxyType({})
    level: bool = True
    counters: Mapping[int, Tensor] = MappingProxyType({})
    began: Any = None
    done: Any = None


class DeviceSteps:
    """The steps of one rank's device.

    ``ahead``: Python may be ahead of it.
    """

    def __init__(self, device: torch.device, optimizer: torch.optim.Optimizer) -> None:
        self.ahead = device.type == "cuda"
        self._device, self._optimizer = device, optimizer
        self._marks: tuple[StepMark, ...] = ()  # replaced as a whole: another thread reads it
        self._began: Any = None
        self._stream: Any = torch.cuda.Stream(device) if self.ahead else None
        size = BOUNCE if self.ahead else 0
        self._bounce = torch.empty(size, dtype=torch.uint8, pin_memory=self.ahead)

    def change(self) -> None:
        """Note that the weights change from now on; in the loop's thread."""
        self._began = self._event()

    def mark(
        self, step: int, copies: Mapping[str, Tensor], level: bool, describe: Callable[[], str]
    ) -> None:
        """Note that a step is complete; in the loop's thread.

        Args:
            copies, level: see StepMark.
            describe: makes the meta of its checkpoint.
        """
        if not self.ahead:
            self._marks = (StepMark(step, copies=copies, level=level),)
            return
        mark = StepMark(
            step, describe(), copies, level, self._counters(), self._began, self._event()
        )
        marks = (*self._marks, mark)
        first = max((i for i, each in enumerate(marks) if each.done.query()), default=0)
        self._marks = marks[first:]
        self._began = None  # after it is among them

    def forget(self) -> None:
        """Note that a change has begun that may not have been completed."""
        if not self.ahead:
            self._marks = ()

    def newest(self) -> StepMark | None:
        """The newest step that the device has completed, once it makes no more."""
        if self.ahead:
            torch.cuda.set_device(self._device)  # a new thread would make a context on GPU 0
        mark, since = self._complete(), time.monotonic()
        while self.ahead and time.monotonic() < since + QUIET:
            time.sleep(LOOK)
            if (now := self._complete()) is not mark:
                mark, since = now, time.monotonic()
        return mark

    def _complete(self) -> StepMark | None:
        marks = reversed(self._marks)
        return next((mark for mark in marks if mark.done is None or mark.done.query()), None)

    def holds(self, mark: StepMark) -> bool:
        """Whether the device has not begun to change the weights after a step."""
        later = [other.began for other in self._marks if other.step > mark.step]
        return not any(began is not None and began.query() for began in (*later, self._began))

    def is_last(self, mark: StepMark) -> bool:
        """Whether Python has marked no later step, and begun no change."""
        return self._began is None and bool(self._marks) and self._marks[-1] is mark

    def on_host(self, tensors: Mapping[str, Tensor], mark: StepMark) -> dict[str, Tensor]:
        """The tensors as of a step, in host memory; those that lie there are not copied."""
        with self.aside():
            return {name: self._copied(t) if t.is_cuda else mark.counters.get(id(t), t)
                    for name, t in tensors.items()}  # fmt: skip

    def number(self, tensor: Tensor) -> float | complex:
        """The number in a tensor of a step that is complete."""
        with self.aside():
            return (self._copied(tensor) if tensor.is_cuda else tensor).item()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Within, work of this thread on the GPU does not wait for the training's."""
        with torch.cuda.stream(self._stream) if self.ahead else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device != self._device:  # the stream and the events are of one device
            raise CheckpointError(f"a tensor is on {tensor.device}, the rank on {self._device}")
        flat = spanned(tensor.detach())
        copy = torch.empty_like(flat, device="cpu")
        source, target = flat.view(torch.uint8), copy.view(torch.uint8)
        for first in range(0, len(source), BOUNCE):
            part = self._bounce[: min(BOUNCE, len(source) - first)]
            part.copy_(source[first : first + BOUNCE], non_blocking=True)
            self._stream.synchronize()
            target[first : first + BOUNCE].copy_(part)
        return shaped(copy, tensor).contiguous()

    def _counters(self) -> dict[int, Tensor]:
        """Copies of the numbers that the optimizer has on the host: they are Python's."""
        state = self._optimizer.state
        tensors = (t for each in state.values() for t in each.values() if isinstance(t, Tensor))
        return {id(tensor): tensor.clone() for tensor in tensors if not tensor.is_cuda}

    def _event(self) -> Any:
        return torch.cuda.current_stream(self._device).record_event() if self.ahead else None


def spanned(tensor: Tensor) -> Tensor:
    """The memory that a tensor spans, as one dimension and without a copy."""
    steps = zip(tensor.size(), tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,))


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """A copy of what ``spanned`` gives, in the form of the tensor."""
    return memory.as_strided(like.size(), like.stride(), 0)
