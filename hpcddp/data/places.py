"""A place of data, asked with patience: a store that fails for some minutes ends no training.

A trouble that may pass (a refused or lost connection, a time-out, an error of the server) is tried
again with growing pauses; a mistake (no such bucket, no right to read) is an error at once. One
line says that a store does not answer, and one that it does again.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from hpcddp.data import names, stores
from hpcddp.data.objects import StoreObject
from hpcddp.data.store_errors import Trouble
from hpcddp.errors import (
    HpcddpError,
    ObjectMissing,
    ObjectUnreadable,
    StoreUnreachable,
    UserError,
)

T = TypeVar("T")
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds
VAIN = 10  # tries with some bytes, but no more than before, that count as silence
# Of its own: a dataset that draws from the default generator is read twice (see train/samples.py).
_chance = random.SystemRandom()
_down: dict[tuple[int, str], float] = {}  # by process and store: since when it does not answer
_spoke: dict[tuple[int, str], float] = {}  # and when it did again


@dataclass(frozen=True)
class Place:
    """A root and the patience with it; plain data, which any process can use.

    Args:
        root: an absolute folder, or a URL.
        patience: seconds that a store may be silent.
    """

    root: str
    patience: float

    @classmethod
    def of(cls, root: str | os.PathLike[str], patience: float) -> Place:
        """A place as a person writes it.

        Raises:
            UserError: it names no bucket, or has a password or a signature in it.
        """
        text = os.fspath(root)
        names.refuse_password(text)
        if stores.scheme(text) == "file":
            text = text.partition("://")[2]
        if not stores.scheme(text):
            return cls(str(Path(text).expanduser().absolute()), patience)
        if stores.scheme(text) == "s3" and not text.partition("://")[2].strip("/"):
            raise UserError("names no bucket", where=text, hint="write it as s3://BUCKET/PREFIX")
        return cls(text.rstrip("/") if not text.endswith("://") else text, patience)

    @property
    def remote(self) -> bool:
        return bool(stores.scheme(self.root))

    def at(self, name: str) -> str:
        """The path or URL of an object, for a person and as a key."""
        return f"{self.root}/{name}"

    def find(self) -> list[StoreObject]:
        """All objects, in the order of their names' parts."""
        return sorted(self._all(self._store.find), key=lambda f: f.name.replace("/", "\0"))

    def named(self, names: Collection[str]) -> dict[str, StoreObject]:
        """Objects of these names, those that are there; other ones may be many, or hidden."""
        return {item.name: item for item in self._all(lambda: self._store.named(names))}

    def _all(self, ask: Callable[[], Iterable[StoreObject]]) -> list[StoreObject]:
        objects: list[StoreObject] = []

        def once() -> None:
            objects.clear()
            objects.extend(ask())

        self._patiently(self.root, once, lambda: len(objects))
        return objects

    def read(self, name: str, start: int = 0, size: int = -1) -> bytes:
        """So many bytes of an object, all of it by default.

        Raises:
            ObjectMissing: it is not there.
            ObjectUnreadable: it cannot or may not be read; other objects may be.
            UserError: nothing may be read, or there are fewer bytes.
            StoreUnreachable: the store does not answer for too long.
        """
        data = self._patiently(self.at(name), lambda: self._store.read(name, start, size))
        if 0 <= size != len(data):
            raise UserError(
                f"has {len(data)} bytes from {start} on, where {size} were listed",
                where=self.at(name),
                hint="it has changed since it was listed: begin a new run",
            )
        return data

    def open(self, name: str) -> BinaryIO:
        """A local file; raises as ``read``."""
        return self._patiently(self.at(name), lambda: stores.open_local(self.at(name)))

    def copy(self, name: str, out: BinaryIO) -> None:
        """Write all of an object into a file; raises as ``read``."""

        def once() -> None:
            out.seek(0)
            out.truncate()
            for block in self._store.stream(name):
                out.write(block)

        self._patiently(self.at(name), once, out.tell)

    @property
    def _store(self) -> stores.Store:
        return stores.store(self.root)

    @property
    def _name(self) -> str:
        """The store as a whole: s3://bucket."""
        scheme, mark, rest = self.root.partition("://")
        return scheme + mark + rest.partition("/")[0] if mark else self.root

    def _patiently(
        self, where: str, call: Callable[[], T], got: Callable[[], int] = lambda: 0
    ) -> T:
        """The result of a call, tried again while the store may recover. ``got`` tells how far a
        failed try came: a store that gives some bytes is not silent."""
        end, pause, furthest, vain = 0.0, FIRST_PAUSE, 0, 0
        while True:
            began = time.monotonic()
            try:
                result = call()
            except Trouble as trouble:
                now = time.monotonic()
                if far := got():
                    vain = 0 if far > furthest else vain + 1
                    furthest = max(far, furthest)
                    end, pause = (0.0, FIRST_PAUSE) if vain < VAIN else (end, pause)
                end = end or now + self.patience
                if not trouble.kind.passes or now >= end:
                    raise _error(trouble, where, self.patience) from None
                self._silent(trouble.reason, began, now)
                time.sleep(min(pause * _chance.uniform(0.5, 1.5), max(0.05, end - now)))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if _down:
                    self._speaks()
                return result

    def _silent(self, reason: str, began: float, now: float) -> None:
        key = (os.getpid(), self._name)
        if began < _spoke.get(key, 0.0):  # another thread has had an answer since
            return
        if _down.setdefault(key, now) is now:  # of all threads the first
            _say(
                f"{self._name} does not answer ({reason}); trying again for up to "
                f"{self.patience:g} s"
            )

    def _speaks(self) -> None:
        key = (os.getpid(), self._name)
        _spoke[key] = time.monotonic()  # first: another thread may look in between
        if (since := _down.pop(key, None)) is not None:
            _say(f"{self._name} answers again, after {time.monotonic() - since:.0f} s")


def _error(trouble: Trouble, where: str, patience: float) -> HpcddpError:
    what, hint, passes, alone = trouble.kind
    reason = f": {trouble.reason}" if trouble.reason else ""
    if passes:
        what = f"{what} for {patience:g} s{reason}"
        hint += " data.retry_seconds says how long it is asked"
        return StoreUnreachable(what, where=where, hint=hint)
    kind = ObjectUnreadable if alone else UserError
    return (ObjectMissing if trouble.missing else kind)(what + reason, where=where, hint=hint)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
