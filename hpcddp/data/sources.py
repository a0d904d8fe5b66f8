"""Sources of staged data: folders and files that the node can read, and stores."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from hpcddp.data.objects import StoreObject
from hpcddp.data.places import Place
from hpcddp.data.tree import walk
from hpcddp.errors import UserError

BLOCK = 4 << 20  # bytes of one read
EPOCH, SPAN = (
    10**18,
    5 * 10**17,
)  # nanoseconds: an object's version becomes a time from 2001 to 2017


class File(NamedTuple):
    """A file of a source. The name is empty where the entry itself is a file.

    ``stamp`` changes with the content. It becomes the copy's modification time, in nanoseconds
    since the epoch.
    """

    name: str
    size: int
    stamp: int
    mode: int = 0o600


class Source(Protocol):
    """Lists and reads an entry of data.stage."""

    def find(self) -> Iterator[File]:
        """All files, including hidden ones."""

    def read(self, file: File, start: int) -> Iterator[bytes]:
        """A file's content from byte ``start``, in blocks."""


def source(entry: str, patience: float) -> Source:
    """The source that an entry of data.stage names.

    Args:
        patience: seconds to retry while a store does not answer.
    """
    if "://" in entry:
        return StoreSource(entry, patience)
    return LocalSource(Path(os.path.expandvars(entry)))


class LocalSource:
    """A folder or a file. Symbolic links are followed, cycles are not. Devices, pipes and sockets
    are left out."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self) -> Iterator[File]:
        try:
            facts = self._root.stat()
        except OSError as error:
            hint = "data.stage requires paths that every node can read"
            what = f"cannot stage: {error.strerror}"
            raise UserError(what, where=str(self._root), hint=hint) from None
        if stat.S_ISDIR(facts.st_mode):
            yield from self._below()
        else:
            yield _file("", facts)

    def _below(self) -> Iterator[File]:
        for name, entry in walk(self._root):
            with contextlib.suppress(FileNotFoundError):  # a link to nothing
                if stat.S_ISREG((facts := entry.stat()).st_mode):
                    yield _file(name, facts)

    def read(self, file: File, start: int) -> Iterator[bytes]:
        with (self._root / file.name).open("rb", buffering=0) as content:
            content.seek(start)
            while data := content.read(BLOCK):
                yield data


def _file(name: str, facts: os.stat_result) -> File:
    return File(name, facts.st_size, facts.st_mtime_ns, 0o600 | (facts.st_mode & 0o777))


class StoreSource:
    """The objects below a URL, or one object."""

    def __init__(self, root: str, patience: float) -> None:
        self._place = Place.of(root, patience)
        self._above, _, self._name = self._place.root.rpartition("/")
        self._patience = patience

    def find(self) -> Iterator[File]:
        empty = True
        for item in self._place.find():
            if item.name.endswith("/"):  # a folder
                continue
            empty = False
            yield self._file(item.name, item)
        if empty:
            yield self._object()

    def _object(self) -> File:
        """The entry as one object."""
        above = Place.of(self._above, self._patience)
        if "://" in self._above and (item := above.named([self._name]).get(self._name)):
            self._place = above
            return self._file("", item)
        raise UserError("no objects to stage", where=self._place.root,
                        hint="check the spelling of the prefix")  # fmt: skip

    def _file(self, name: str, item: StoreObject) -> File:
        if item.size < 0:
            raise UserError(
                "the store does not report the object's size",
                where=self._place.at(name),
                hint="copy it to a folder that all nodes can read, and stage that",
            )
        return File(name, item.size, EPOCH + item.version % SPAN)

    def read(self, file: File, start: int) -> Iterator[bytes]:
        for offset in range(start, file.size, BLOCK):
            size = min(BLOCK, file.size - offset)
            yield self._place.read(file.name or self._name, offset, size)
