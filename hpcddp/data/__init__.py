"""Data from where it lies: folders of images and tar shards, local or in an object store.

``ImageFolder`` and ``pack`` are imported when they are first asked for: torch comes with them, and
the plan half asks this package for names.

It imports ``attempt`` and the root, and a store's package only when a store is read.
Others use ``names`` (which data a job names), ``stage`` (a copy on the node) and ``node_wait``.
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
