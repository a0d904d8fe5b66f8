"""The bytes of a dataset's samples: from the node's disk, from its cache, or from the store.

A batch's objects are fetched at once by a few threads, so that their latencies overlap. Threads,
files and fetched bytes belong to one process; only plain data is copied to another.
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

THREADS = 16  # that fetch, in each process; they wait more than they work
AHEAD = 256 << 20  # bytes of a batch that are fetched ahead
OPEN = 64  # shards that a process keeps open
SMALL = 1 << 20  # bytes that are read at once where they are on the node's disk
UNKNOWN = 1 << 20  # bytes, for an object whose size is not known
NODES = 4  # that take whole shards of which they read a part


class ObjectCache(Protocol):
    """A cache of objects, as in cache.py. It may have a ``limit`` in bytes."""

    def get(self, key: str, size: int, fetch: Callable[[BinaryIO], None]) -> BinaryIO | None:
        """The object, to read from; None if it cannot be kept."""

    def read(self, key: str, size: int) -> bytes | None:
        """The whole object, if it is kept now."""


class Reading:
    """``reading(index)`` gives a sample's bytes.

    Args:
        cache: for objects of a store; None keeps nothing.
        nodes: that read this dataset together.
    """

    def __init__(
        self, place: Place, listing: Listing, cache: ObjectCache | None, nodes: int = 1
    ) -> None:
        self._place, self._listing = place, listing
        self._cache = cache if place.remote else None
        self._takes_shards = not place.remote or _whole_shards(listing, self._cache, nodes)
        # Whether an epoch brings all of it to this node.
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
        """The path or URL of a sample, for a person."""
        sample = self._listing[index]
        if sample.shard < 0:
            return self._place.at(sample.name)
        return f"{self._place.at(self._listing.shards[sample.shard].name)}: {sample.name}"

    def ahead(self, indices: Iterable[int]) -> None:
        """Begin to fetch these samples, and drop those that were fetched before."""
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
        """A sample's bytes, if the cache has them: a read is faster than the start of a thread."""
        sample = self._listing[index]
        if self._cache is None or sample.shard >= 0 or not sample.version or sample.size > SMALL:
            return None
        return self._cache.read(self._key(sample.name, sample.size, sample.version), sample.size)

    def holds(self, indices: Iterable[int]) -> bool:
        """Whether these are on their way already."""
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
        name = self._listing.shards[sample.shard].name  # or an error that says why
        return self._place.read(name, sample.start, sample.size)

    def _whole(self, sample: Sample) -> bytes:
        """An image that is a file of its own."""
        file = self._near(sample.name, sample.size, sample.version)
        if file:
            with file, contextlib.suppress(OSError):
                if len(data := file.read()) == sample.size:
                    return data
        return self._place.read(sample.name)

    def _near(self, name: str, size: int, version: int) -> BinaryIO | None:
        """An object's copy in the cache. One that may change unseen is not kept."""
        if self._cache is None or not version or size < 0:
            return None
        key = self._key(name, size, version)
        return self._cache.get(key, size, lambda out: self._place.copy(name, out))

    def _key(self, name: str, size: int, version: int) -> str:
        return f"{self._place.at(name)} {size} {version}"

    def _shard(self, number: int) -> _ObjectFile | None:
        """A shard to read from; None where it must be asked of the store. Of several threads the
        first one opens it."""
        if not self._takes_shards:
            return None
        shards = self._process.shards
        mine: Future[_ObjectFile | None] = Future()
        first = shards.setdefault(number, mine)
        if first is mine:
            for old in list(shards)[: max(0, len(shards) - OPEN)]:
                shards.pop(old, None)  # its last reader closes it
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
    """Whether a node takes whole shards from a store. All nodes are at the same few shards at a
    time, so each would take every shard, for one part in ``nodes`` of its samples, and in every
    epoch anew unless its cache keeps all of them."""
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
        """So many bytes, or fewer: at its end, and where the disk fails."""
        try:
            return os.pread(self._fd, size, start)
        except OSError:
            return b""


class _ThisProcess:
    """The state of one process. After a fork the threads are gone, so the child makes its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.samples: dict[int, Future[bytes] | bytes] = {}
        self.shards: dict[int, Future[_ObjectFile | None]] = {}
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        self._pool = self._pool or Pool(THREADS)
        return self._pool
