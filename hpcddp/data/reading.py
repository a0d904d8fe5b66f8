"""The bytes of a dataset's samples: from the node's disk, from its cache, or from the store.

A few threads fetch the objects of a batch concurrently, so that their latencies overlap. Threads,
files and fetched bytes belong to one process; other processes get plain data only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, BinaryIO, Protocol

from hpcddp.data.listing import Listing, Sample
from hpcddp.data.places import Place
from hpcddp.data.pool import Pool

THREADS = 16  # fetching threads of a process; they mostly wait
AHEAD = 256 << 20  # bytes of a batch that are fetched ahead
OPEN = 64  # shards that a process keeps open
SMALL = 1 << 20  # bytes; a cached object up to this size is read without a thread
UNKNOWN = 1 << 20  # bytes assumed for an object of unknown size
NODES = 4  # most nodes that fetch whole shards although each reads a part of them


class ObjectCache(Protocol):
    """A cache of objects, such as cache.Cache. It may have a ``limit`` in bytes."""

    def get(self, key: str, size: int, fetch: Callable[[BinaryIO], None]) -> BinaryIO | None:
        """The object as a readable file; None if the cache cannot store it."""

    def read(self, key: str, size: int) -> bytes | None:
        """The whole object if it is cached, else None."""


class Reading:
    """Reads samples: ``reading(index)`` returns a sample's bytes.

    Args:
        cache: for objects of a store; None for no cache.
        nodes: number of nodes that read this dataset together.
    """

    def __init__(
        self, place: Place, listing: Listing, cache: ObjectCache | None, nodes: int = 1
    ) -> None:
        self._place, self._listing = place, listing
        self._cache = cache if place.remote else None
        self._takes_shards = not place.remote or _whole_shards(listing, self._cache, nodes)
        # Whether an epoch brings all samples to this node.
        self.comes_whole = nodes == 1 or (bool(listing.shards) and self._takes_shards)
        self._here = _ThisProcess()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_here": None}

    def __call__(self, index: int) -> bytes:
        fetched = self._process.samples.get(index)
        if fetched is None:
            return self._fetch(index)
        return fetched if isinstance(fetched, bytes) else fetched.result()

    def where(self, index: int) -> str:
        """The path or URL of a sample, for messages."""
        sample = self._listing[index]
        if sample.shard < 0:
            return self._place.at(sample.name)
        return f"{self._place.at(self._listing.shards[sample.shard].name)}: {sample.name}"

    def ahead(self, indices: Iterable[int]) -> None:
        """Start to fetch these samples, and drop those fetched before."""
        here = self._process
        held, here.samples = here.samples, {}
        if not self._place.remote:
            return
        room = AHEAD
        for index in indices:
            size = int(self._listing.size[index])
            room -= size if size >= 0 else UNKNOWN
            if room < 0:
                return
            fetched = held.get(index) or self._kept(index)
            here.samples[index] = fetched or here.pool.submit(
                lambda index=index: self._fetch(index)  # type: ignore[misc]
            )

    def _kept(self, index: int) -> bytes | None:
        """A small sample's bytes from the cache: reading them is faster than starting a thread."""
        sample = self._listing[index]
        if self._cache is None or sample.shard >= 0 or not sample.version or sample.size > SMALL:
            return None
        return self._cache.read(self._key(sample.name, sample.size, sample.version), sample.size)

    def holds(self, indices: Iterable[int]) -> bool:
        """Whether all these samples are already being fetched."""
        return self._process.samples.keys() >= set(indices)

    @property
    def _process(self) -> _ThisProcess:
        if self._here is None or self._here.pid != os.getpid():
            self._here = _ThisProcess()
        return self._here

    def _fetch(self, index: int) -> bytes:
        sample = self._listing[index]
        if sample.shard < 0:
            return self._whole(sample)
        file = self._shard(sample.shard)
        data = file.read(sample.start, sample.size) if file else b""
        if len(data) == sample.size:
            return data
        name = self._listing.shards[sample.shard].name  # raises an error with the cause
        return self._place.read(name, sample.start, sample.size)

    def _whole(self, sample: Sample) -> bytes:
        """A sample that is a whole object."""
        file = self._near(sample.name, sample.size, sample.version)
        if file:
            with file, contextlib.suppress(OSError):
                if len(data := file.read()) == sample.size:
                    return data
        return self._place.read(sample.name)

    def _near(self, name: str, size: int, version: int) -> BinaryIO | None:
        """An object's copy in the cache. Objects without a version are not cached."""
        if self._cache is None or not version or size < 0:
            return None
        key = self._key(name, size, version)
        return self._cache.get(key, size, lambda out: self._place.copy(name, out))

    def _key(self, name: str, size: int, version: int) -> str:
        return f"{self._place.at(name)} {size} {version}"

    def _shard(self, number: int) -> _ObjectFile | None:
        """An open shard; None where its samples are read from the store one by one.

        The first of several threads opens it.
        """
        if not self._takes_shards:
            return None
        shards = self._process.shards
        mine: Future[_ObjectFile | None] = Future()
        first = shards.setdefault(number, mine)
        if first is mine:
            for old in list(shards)[: max(0, len(shards) - OPEN)]:
                shards.pop(old, None)  # closed with its last reference
            try:
                mine.set_result(self._opened(number))
            except BaseException as error:
                shards.pop(number, None)
                mine.set_exception(error)
        return first.result()

    def _opened(self, number: int) -> _ObjectFile | None:
        name, size, version = self._listing.shards[number]
        remote = self._place.remote
        file = self._near(name, size, version) if remote else self._place.open(name)
        return _ObjectFile(file) if file else None


def _whole_shards(listing: Listing, cache: ObjectCache | None, nodes: int) -> bool:
    """Whether a node fetches whole shards from a store.

    All nodes read the same few shards at a time. So each node would fetch every shard for 1 in
    ``nodes`` of its samples, and again in every epoch unless its cache has room for all shards.
    """
    kept: int = getattr(cache, "limit", 0)
    held = sum(max(0, shard.size) for shard in listing.shards)
    return cache is not None and (nodes <= NODES or held <= kept)


class _ObjectFile:
    """An open file that closes itself with its last reference."""

    def __init__(self, file: BinaryIO) -> None:
        with file:
            self._fd = os.dup(file.fileno())

    def __del__(self) -> None:
        os.close(self._fd)

    def read(self, start: int, size: int) -> bytes:
        """Up to ``size`` bytes: fewer at the end of the file, or where the disk fails."""
        try:
            return os.pread(self._fd, size, start)
        except OSError:
            return b""


class _ThisProcess:
    """The state of one process. A forked child has no threads, so it makes its own state."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.samples: dict[int, Future[bytes] | bytes] = {}
        self.shards: dict[int, Future[_ObjectFile | None]] = {}
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        self._pool = self._pool or Pool(THREADS)
        return self._pool
