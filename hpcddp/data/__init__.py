"""Datasets: folders of images and tar shards, on a local disk or in an object store.

``ImageFolder`` and ``pack`` are imported on first use, because they import torch, and the plan half
uses this package without torch.

It imports ``attempt`` and the root, and a store's package only to read from that store.
Others use ``names`` (the data that a job names), ``stage`` (a copy on the node) and ``node_wait``.
Its folder `node_cache` keeps data on a node's disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcddp.data.images import ImageFolder as ImageFolder
    from hpcddp.data.images import S3ImageFolder as S3ImageFolder
    from hpcddp.data.packing import pack as pack

__all__ = ["ImageFolder", "S3ImageFolder", "pack"]
_LAZY = {"ImageFolder": "images", "S3ImageFolder": "images", "pack": "packing"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hpcddp.data.{_LAZY[name]}"), name)
