"""Reading with retries: a store that fails for some minutes does not end a training.

After a passing failure (connection refused or lost, time-out, server error) the call is repeated
with growing pauses. A user error (no such bucket, access denied) is raised at once. One line
reports that a store does not answer, and another that it answers again.
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
VAIN = 10  # tries in a row without further progress that count as no answer
# Independent of the default generators, which the samples depend on (train/input/seeding.py).
_chance = random.SystemRandom()
_down: dict[tuple[int, str], float] = {}  # (process, store) -> time of the first failure
_spoke: dict[tuple[int, str], float] = {}  # (process, store) -> time of the recovery


@dataclass(frozen=True)
class Place:
    """A root and how long to retry; plain data that can be sent to other processes.

    Args:
        root: absolute path of a folder, or a URL.
        patience: seconds to retry while a store does not answer.
    """

    root: str
    patience: float

    @classmethod
    def of(cls, root: str | os.PathLike[str], patience: float) -> Place:
        """Make a place from a path or URL as a user writes it.

        Raises:
            UserError: the URL names no bucket, or contains a password or a signature.
        """
        text = os.fspath(root)
        names.refuse_password(text)
        if stores.scheme(text) == "file":
            text = text.partition("://")[2]
        if not stores.scheme(text):
            return cls(str(Path(text).expanduser().absolute()), patience)
        if stores.scheme(text) == "s3" and not text.partition("://")[2].strip("/"):
            raise UserError("the URL names no bucket", where=text, hint="use s3://BUCKET/PREFIX")
        return cls(text.rstrip("/") if not text.endswith("://") else text, patience)

    @property
    def remote(self) -> bool:
        return bool(stores.scheme(self.root))

    def at(self, name: str) -> str:
        """The path or URL of an object, for messages and as a key."""
        return f"{self.root}/{name}"

    def find(self) -> list[StoreObject]:
        """All objects, sorted by the parts of their names."""
        return sorted(self._all(self._store.find), key=lambda f: f.name.replace("/", "\0"))

    def named(self, names: Collection[str]) -> dict[str, StoreObject]:
        """The objects with these names, hidden ones too; missing ones are left out."""
        return {item.name: item for item in self._all(lambda: self._store.named(names))}

    def _all(self, ask: Callable[[], Iterable[StoreObject]]) -> list[StoreObject]:
        objects: list[StoreObject] = []

        def once() -> None:
            objects.clear()
            objects.extend(ask())

        self._patiently(self.root, once, lambda: len(objects))
        return objects

    def read(self, name: str, start: int = 0, size: int = -1) -> bytes:
        """Read ``size`` bytes of an object from ``start``; by default the whole object.

        Raises:
            ObjectMissing: the object does not exist.
            ObjectUnreadable: the object is not readable, but others may be.
            UserError: the store does not allow reading, or the object is shorter.
            StoreUnreachable: the store did not answer in time.
        """
        data = self._patiently(self.at(name), lambda: self._store.read(name, start, size))
        if 0 <= size != len(data):
            raise UserError(
                f"expected {size} bytes at offset {start}, got {len(data)}",
                where=self.at(name),
                hint="the data changed after it was listed: submit a new run",
            )
        return data

    def open(self, name: str) -> BinaryIO:
        """Open a local file; raises as ``read``."""
        return self._patiently(self.at(name), lambda: stores.open_local(self.at(name)))

    def copy(self, name: str, out: BinaryIO) -> None:
        """Copy a whole object into a file; raises as ``read``."""

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
        """Return the result of a call; repeat the call while the store may recover.

        Args:
            got: progress of the last try, such as bytes. Progress restarts the time limit.
        """
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
        if began < _spoke.get(key, 0.0):  # another thread got an answer since
            return
        if _down.setdefault(key, now) is now:  # the first thread
            _say(f"{self._name} does not answer ({reason}); retrying for up to {self.patience:g} s")

    def _speaks(self) -> None:
        key = (os.getpid(), self._name)
        _spoke[key] = time.monotonic()  # first: another thread may look in between
        if (since := _down.pop(key, None)) is not None:
            _say(f"{self._name} answers again after {time.monotonic() - since:.0f} s")


def _error(trouble: Trouble, where: str, patience: float) -> HpcddpError:
    what, hint, passes, alone = trouble.kind
    reason = f": {trouble.reason}" if trouble.reason else ""
    if passes:
        what = f"{what} for {patience:g} s{reason}"
        hint += "; raise data.retry_seconds to retry for longer"
        return StoreUnreachable(what, where=where, hint=hint)
    kind = ObjectUnreadable if alone else UserError
    return (ObjectMissing if trouble.missing else kind)(what + reason, where=where, hint=hint)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
