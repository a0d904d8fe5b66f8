"""The samples of a dataset: a table in flat arrays, and the same table as a file.

A sample is (object, start, size, class): a whole image file, or a part of a tar shard. The table is
a few arrays, not a million tuples: each loader process would copy the tuples, because it changes
their reference counts.

    {"format": 1, "root": ..., "classes": [...], "shards": [[name, bytes, version], ...],
     "samples": N}
    class, shard or -1, start, bytes or -1, version, name         N lines, separated by tabs
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcddp.data.objects import StoreObject
from hpcddp.errors import RunError
from hpcddp.rundir import token

FORMAT = 1
_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
_PLAIN = {"\\": "\\", "t": "\t", "n": "\n", "r": "\r"}


class Sample(NamedTuple):
    """One row: class number; shard number, -1 for an image file; first byte and size (bytes) in
    that object; version of an image file; name."""

    label: int
    shard: int
    start: int
    size: int
    version: int
    name: str


class Names:
    """Many strings in two arrays."""

    def __init__(self, data: bytes | bytearray, ends: array[int]) -> None:
        self._data: NDArray[np.uint8] = np.frombuffer(bytes(data), np.uint8)
        self._ends: NDArray[np.int64] = np.array(ends, np.int64)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        return self._data[start : self._ends[index]].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Listing:
    """The samples of a root. All arrays have the shape [samples]."""

    root: str
    classes: list[str]
    shards: list[StoreObject]
    labels: NDArray[np.int64]
    shard: NDArray[np.int32]
    start: NDArray[np.int64]
    size: NDArray[np.int64]
    version: NDArray[np.int64]
    names: Names

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        label, shard, start, size, version = (int(a[index]) for a in self._columns)
        return Sample(label, shard, start, size, version, self.names[index])

    @property
    def _columns(self) -> tuple[NDArray[Any], ...]:
        return self.labels, self.shard, self.start, self.size, self.version

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """Number of samples in each shard, int64 of shape [shards]; None without shards."""
        if not self.shards:
            return None
        return np.bincount(self.shard, minlength=len(self.shards)).astype(np.int64)


def collect(
    root: str, classes: Sequence[str], shards: Sequence[StoreObject], samples: Iterable[Sample]
) -> Listing:
    """Make a listing; ``samples`` may be an iterator."""
    labels, shard, start, size, version, ends = (array(kind) for kind in "qiqqqq")
    data = bytearray()
    for sample in samples:
        labels.append(sample.label)
        shard.append(sample.shard)
        start.append(sample.start)
        size.append(sample.size)
        version.append(sample.version)
        data += sample.name.encode("utf-8", "surrogateescape")
        ends.append(len(data))
    return Listing(
        root,
        list(classes),
        list(shards),
        np.array(labels, np.int64),
        np.array(shard, np.int32),
        np.array(start, np.int64),
        np.array(size, np.int64),
        np.array(version, np.int64),
        Names(data, ends),
    )


def write(path: Path, listing: Listing) -> None:
    """Write a listing to a file, unless another process has written that file already."""
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.{token(3)}")
    try:
        with open(aside, "x", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            file.writelines(_lines(listing))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(aside, path)
        except FileExistsError:
            return
    finally:
        aside.unlink(missing_ok=True)


def _lines(listing: Listing) -> Iterator[str]:
    head = {"format": FORMAT, "root": listing.root, "classes": listing.classes}
    yield json.dumps(head | {"shards": listing.shards, "samples": len(listing)}) + "\n"
    for i in range(len(listing)):
        *numbers, name = listing[i]
        yield "\t".join(map(str, numbers)) + f"\t{name.translate(_ESCAPES)}\n"


def read(path: Path) -> Listing:
    """Read a listing from a file.

    Raises:
        FileNotFoundError: the file does not exist yet.
        RunError: the file is damaged.
    """
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        try:
            head: dict[str, Any] = json.loads(file.readline())
            shards = [StoreObject(*shard) for shard in head["shards"]]
            listing = collect(head["root"], head["classes"], shards, map(_sample, file))
            if head["format"] != FORMAT or len(listing) != head["samples"]:
                raise ValueError(f"expected {head['samples']} lines, got {len(listing)}")
        except (ValueError, TypeError, KeyError) as error:
            raise RunError(
                f"damaged listing: {error}",
                where=str(path),
                hint="delete the file: hpcddp then lists the data again, as it is now",
            ) from None
    return listing


def _sample(line: str) -> Sample:
    if not line.endswith("\n"):
        raise ValueError("the last line is incomplete")
    *numbers, name = line[:-1].split("\t")
    label, shard, start, size, version = map(int, numbers)
    if "\\" in name:
        letters = iter(name)
        name = "".join(_PLAIN[next(letters)] if c == "\\" else c for c in letters)
    return Sample(label, shard, start, size, version, name)
