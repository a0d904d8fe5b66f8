"""Numbers of a device, read so that another thread of the process can copy meanwhile.

A copy to ordinary memory keeps a lock of CUDA's until the device has come to it: if the device
waits for a lost rank, for ever. While a copy goes to pinned memory, only this thread waits. (CUDA
C++ Programming Guide, "Concurrent Data Transfers"; ``Tensor.item`` does the same.)
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readout:
    """Reads tensors of float64 or smaller numbers.

    Args:
        size: the most numbers of one tensor. Their memory is made now: later, it might have to wait
            for the device.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        gpu = device.type == "cuda"
        self._pinned = torch.empty(size if gpu else 0, dtype=torch.float64, pin_memory=gpu)

    def numbers(self, tensor: Tensor) -> list[float]:
        """The numbers in a tensor of one dimension, in place of ``Tensor.tolist``."""
        if tensor.is_cuda:
            copy = self._pinned.view(tensor.dtype)[: len(tensor)]
            copy.copy_(tensor.detach(), non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
            tensor = copy
        return list(tensor.tolist())
