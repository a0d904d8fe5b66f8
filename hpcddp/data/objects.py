"""An object of a store: name below the root, size and version."""

from __future__ import annotations

import hashlib
from typing import NamedTuple


class StoreObject(NamedTuple):
    """An object below a root. The name of a folder ends with a slash."""

    name: str
    size: int = -1  # bytes; -1 if unknown
    version: int = 0  # changes with the content; 0 if unknown


def version_of(tag: object) -> int:
    """A 63-bit version from a store's own tag; 0 without a tag."""
    return int.from_bytes(hashlib.sha256(str(tag).encode()).digest()[:8]) >> 1 if tag else 0
