"""Bytes of a tensor in a Python without numpy, which torch requires in a few functions alone.

One of them decodes the objects that ranks exchange, and those of a checkpoint's plan (torch 2.13,
distributed_c10d._tensor_to_object).
"""

from __future__ import annotations

import ctypes
import importlib.util
import io
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d

_DECODER = "_tensor_to_object"


def content(tensor: Tensor) -> bytes:
    """The bytes of a contiguous tensor on the CPU."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def provide() -> None:
    """Let torch decode objects without numpy, if that is not installed."""
    if importlib.util.find_spec("numpy") is None and hasattr(distributed_c10d, _DECODER):
        setattr(distributed_c10d, _DECODER, _object)


def _object(tensor: Tensor, tensor_size: int, group: Any = None) -> Any:
    """What another rank has sent; in the place of torch's function."""
    sent = content(tensor.cpu().contiguous())[: int(tensor_size)]
    return distributed_c10d._unpickler(io.BytesIO(sent)).load()
