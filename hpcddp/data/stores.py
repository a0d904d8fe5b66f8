"""Stores by the scheme of a URL: each lists and reads the objects below a root.

A store names objects relative to its root, such as ``CLASS/1.jpg``. It makes each request once and
raises ``Trouble`` for a failure; places.py retries. Each process makes its own clients, because a
client does not survive a fork.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from hpcddp.data.objects import StoreObject, version_of
from hpcddp.data.store_errors import Trouble
from hpcddp.data.tree import walk
from hpcddp.errors import UserError, install_extra

T = TypeVar("T")
# The keys under which drivers of fsspec report a version.
VERSIONS = ("etag", "ETag", "md5Hash", "mtime", "LastModified", "last_modified", "created")
BLOCK = 1 << 20  # bytes of one read
FEW = 16  # most objects that are looked up one by one


class Store(Protocol):
    """Lists and reads the objects below a root. All methods raise Trouble."""

    def find(self) -> Iterable[StoreObject]:
        """All objects, in any order."""

    def named(self, names: Collection[str]) -> Iterable[StoreObject]:
        """The objects with these names; missing ones are left out."""

    def read(self, name: str, start: int, size: int) -> bytes:
        """``size`` bytes of an object from ``start``, fewer at its end; size -1 reads all."""

    def stream(self, name: str) -> Iterator[bytes]:
        """A whole object in blocks."""


class Local:
    """A folder. Hidden files are left out; links are followed, cycles are not."""

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def find(self) -> Iterator[StoreObject]:
        try:
            for name, entry in walk(self._root, hidden=False):
                # without sizes: a million stat calls would take minutes
                yield StoreObject(f"{name}/" if entry.is_dir() else name)
        except OSError as error:
            raise _of_disk(error, self._inside(error)) from None

    def named(self, names: Collection[str]) -> Iterator[StoreObject]:
        for name in names:
            try:
                if not stat.S_ISDIR((self._root / name).stat().st_mode):
                    yield StoreObject(name)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise _of_disk(error, self._inside(error)) from None

    def read(self, name: str, start: int, size: int) -> bytes:
        try:
            with open(self._root / name, "rb", buffering=0) as file:
                if size < 0:
                    return file.read()
                return os.pread(file.fileno(), size, start)
        except OSError as error:
            raise _of_disk(error) from None

    def stream(self, name: str) -> Iterator[bytes]:
        try:
            with open(self._root / name, "rb", buffering=0) as file:
                while data := file.read(BLOCK):
                    yield data
        except OSError as error:
            raise _of_disk(error) from None

    def _inside(self, error: OSError) -> str:
        """The path that an error is about, unless it is the root."""
        return "" if str(error.filename) == str(self._root) else str(error.filename)


def open_local(path: str) -> BinaryIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise _of_disk(error) from None


def _of_disk(error: OSError, inside: str = "") -> Trouble:
    if isinstance(error, FileNotFoundError):
        return Trouble("missing", inside)
    kind = "forbidden" if isinstance(error, PermissionError) else "other"
    return Trouble(kind, f"{error.strerror or error}" + (f" ({inside})" if inside else ""))


class Fsspec:
    """Any other store with a driver for fsspec: gs, az, hdfs, memory, ..."""

    def __init__(self, root: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise _without(error, "fsspec", "stores", root) from None
        try:
            self._fs, self._path = url_to_fs(root)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"unsupported store: {error}",
                where=root,
                hint=f"for s3://, {install_extra('s3')}; for other stores, install the "
                "driver that fsspec names",
            ) from None

    def find(self) -> Iterator[StoreObject]:
        objects = _asked(lambda: self._fs.find(self._path, detail=True))
        start = len(self._path.rstrip("/")) + 1 if self._path.strip("/") else len(self._path)
        for name, facts in objects.items():
            if below := name[start:]:  # otherwise the root itself is an object
                yield _object(below, facts)

    def named(self, names: Collection[str]) -> Iterator[StoreObject]:
        if len(names) > FEW:  # one listing is faster than a request for each
            yield from (item for item in self.find() if item.name in names)
            return
        for name in names:
            try:
                facts = _asked(partial(self._fs.info, self._name(name)))
            except Trouble as trouble:
                if not trouble.missing:
                    raise
            else:
                if facts.get("type") != "directory":
                    yield _object(name, facts)

    def read(self, name: str, start: int, size: int) -> bytes:
        end = None if size < 0 else start + size
        data: bytes = _asked(lambda: self._fs.cat_file(self._name(name), start=start, end=end))
        return data

    def stream(self, name: str) -> Iterator[bytes]:
        with _asked(lambda: self._fs.open(self._name(name), "rb")) as file:
            while data := _asked(lambda: file.read(BLOCK)):
                yield data

    def _name(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"


def _object(name: str, facts: Mapping[str, Any]) -> StoreObject:
    size = facts.get("size")
    tag = next((facts[word] for word in VERSIONS if facts.get(word)), None)
    return StoreObject(name, -1 if size is None else int(size), version_of(tag))


def _asked(call: Callable[[], T]) -> T:
    """Call a driver. Drivers raise any exception: one that is not a known user error may pass."""
    try:
        return call()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise Trouble("missing", error) from None
    except PermissionError as error:
        raise Trouble("denied", error) from None
    except (ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise Trouble("other", error) from None
    except Exception as error:
        raise Trouble("down", f"{type(error).__name__}: {error}") from None


def _without(error: ImportError, package: str, extra: str, where: str) -> UserError:
    absent = isinstance(error, ModuleNotFoundError) and "." not in (error.name or "")
    what = f"{package} is not installed" if absent else f"cannot load {package}: {error}"
    return UserError(what, where=where, hint=install_extra(extra))


def _s3(root: str) -> Store:
    try:
        from hpcddp.data.s3 import S3
    except ImportError as error:
        raise _without(error, "s3torchconnector", "s3", root) from None
    return S3(root)


STORES: dict[str, Callable[[str], Store]] = {"": Local, "s3": _s3}

_opened: dict[tuple[int, str], Store] = {}  # by process and root


def scheme(root: str) -> str:
    """The part before ``://``, in lower case; empty for a folder."""
    return root.partition("://")[0].lower() if "://" in root else ""


def store(root: str) -> Store:
    """This process's store for a root.

    Raises:
        UserError: its package is not installed.
    """
    key = os.getpid(), root
    if key not in _opened:
        _opened[key] = STORES.get(scheme(root), Fsspec)(root)
    return _opened[key]
