"""Numbers of a device, read so that another thread of the process can copy meanwhile.

A copy to ordinary memory keeps a lock of CUDA's until the device has come to it: if the device
waits for a lost rank, for ever. From pinned memory on, only this thread waits. (CUDA C++
Programming Guide, "Concurrent Data Transfers"; ``Tensor.item`` does the same.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(tensor: Tensor) -> list[float]:
    """The numbers in a tensor of one dimension, in place of ``Tensor.tolist``."""
    if tensor.is_cuda:
        copy = torch.empty(tensor.size(), dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        tensor = copy
    return list(tensor.tolist())
