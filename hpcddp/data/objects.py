"""An object of a store: its name below the root, its size and its version."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class StoreObject(NamedTuple):
    """An object below a root. A name that ends with a slash is that of a folder."""

    name: str
    size: int = -1  # bytes, -1 if not known
    version: int = 0  # changes with the content; 0 if not known


def version_of(tag: object) -> int:
    """A version from a store's own tag, in 63 bits."""
    return int.from_bytes(hashlib.sha256(str(tag).encode()).digest()[:8]) >> 1 if tag else 0
