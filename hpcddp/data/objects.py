"""An object of a store: its name below the root, its size and its version."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class Found(NamedTuple):
    """An object below a root. A name that ends with a slash only says that there is a folder."""

    name: str
    size: int = -1  # bytes, -1 if not known
    version: int = 0  # changes with the content; 0 if not known


def version_of(tag: object) -> int:
    """A version from what a store calls it, in 63 bits."""
    return int.from_bytes(hashlib.sha256(str(tag).encode()).digest()[:8]) >> 1 if tag else 0
