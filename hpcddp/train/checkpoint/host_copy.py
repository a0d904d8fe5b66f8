"""Copies the state of one instant to host memory while the training continues."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor


class HeldTensors:
    """Stands for HostCopies where nothing changes the tensors: they are used without a copy."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def copy(self) -> None:
        """Do nothing."""

    def ready(self) -> dict[str, Tensor]:
        return self._tensors

    def release(self) -> None:
        """Do nothing."""


class HostCopies:
    """Host copies of tensors, in memory that is reused from one save to the next.

    The loop's thread calls ``take`` and ``join``, the saving thread ``copy`` and ``ready``, in the
    order take, copy, ready; join may come at any time after take. A take follows a ready.

    On a GPU only the saving thread waits for a copy. Tensors that the next forward pass changes are
    copied in the training's own stream, the rest in another stream, both into pinned memory.
    ``join`` makes the training's stream wait for the other one; the host does not wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}
        self._later: Mapping[str, Tensor] = {}
        self._taken: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        self._copied = threading.Event()

    def take(self, now: Mapping[str, Tensor], later: Mapping[str, Tensor]) -> None:
        """Copy ``now``, by name, before this returns; ``later`` must not change before join."""
        names = now.keys() | later.keys()
        self._buffers = {name: t for name, t in self._buffers.items() if name in names}
        self._copied.clear()
        self._later = later
        self._copy(now)
        if self._stream is not None:
            self._taken = torch.cuda.current_stream(self._device).record_event()

    def copy(self) -> None:
        """Copy the rest; on a GPU, add the copy to its stream."""
        try:
            if self._stream is None or self._taken is None:
                self._copy(self._later)
            else:
                torch.cuda.set_device(self._device)  # a new thread would make a context on GPU 0
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(self._taken)
                    self._copy(self._later)
                    self._done = self._stream.record_event()
        finally:
            self._later = {}
            self._copied.set()

    def release(self) -> None:
        """Let ``join`` return, even if the copy has failed."""
        self._copied.set()

    def join(self) -> None:
        """Wait until the tensors may change."""
        self._copied.wait()
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def ready(self) -> dict[str, Tensor]:
        """The copies, once all are complete. They are valid until the next take."""
        if self._done is not None:
            self._done.synchronize()
        return self._buffers

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._buffer(name, tensor).copy_(tensor, non_blocking=True)

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        """Memory for a tensor's copy: that of the last save if it fits."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
        return buffer
