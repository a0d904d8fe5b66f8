"""A node's cache: an object is fetched over the network once, and then read from the node's disk.

    FOLDER/                  hpcddp-cache-UID on the node's own disk, mode 0700
      00/ .. ff/             by the key's hash
        HASH                 content, renamed into place
        HASH.claim           the process that fetches it now
        .HASH.WHO.TOKEN.part its first bytes
      usage                  number of bytes in the cache (usage.py)
      sweep.claim            the process that makes room now

All processes of the node share the cache, also those of the user's other jobs. It lasts as long as
its folder, so it can outlive the job. There are no locks, because a process may be killed at any
point. After any failure the caller reads the data from its source.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from hpcddp.data.node_cache import claims, disk
from hpcddp.data.node_cache.sweep import Files, clear
from hpcddp.data.node_cache.usage import Usage
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_json, token
from hpcddp.sizes import bytes_of
from hpcddp.spec import DataSpec

SPARE = 0.05  # part of the disk that stays free
SLACK = 0.1  # part of the limit that one sweep frees: a sweep for each new file would be slow
TOUCH = 60.0  # seconds between two updates of a file's last use
RECOUNT = 3600.0  # seconds between two counts of the files
WAIT = 200.0  # seconds to wait for another process that fetches; less than train.hang_seconds
PAUSE = 30.0  # seconds without new files after the disk was full
QUIET = 600.0  # seconds between two lines about a full disk, over all processes of the node
FIRST_LOOK, LAST_LOOK = 0.001, 0.05  # seconds between two checks of a process that fetches

Fetch = Callable[[BinaryIO], None]


class Cache:
    """Files by key; the least recently used are evicted first.

    Args:
        folder: the cache's folder.
        limit: bytes; 0 turns the cache off.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._usage = Usage(folder / "usage")
        self._pause = 0.0  # no new files until this time of the monotonic clock

    def get(self, key: str, size: int, fetch: Fetch) -> BinaryIO | None:
        """Open the content of a key for reading; None where it cannot be cached.

        The open file stays readable when it is evicted. Errors of `fetch` are raised, except an
        OSError, which counts as an error of the cache's disk.

        Args:
            key: the content's name and version.
            size: bytes of the content; content of another size is dropped.
            fetch: writes the content into the given file.
        """
        if not 0 <= size <= self.limit or not self.limit:
            return None
        path = Path(self._path(key))
        try:
            try:
                return self._get(path, size, fetch)
            except OSError as error:
                if error.errno not in disk.FULL:
                    raise
                self._sweep(size, max(size, int(SLACK * self.limit)))
                return self._get(path, size, fetch)
        except OSError as error:
            self._refuse(error)
            return None

    def read(self, key: str, size: int) -> bytes | None:
        """The content of a key if it is cached, else None. Faster than `get` for small files."""
        try:
            fd = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            facts = os.fstat(fd)
            if facts.st_size != size:
                return None  # `get` drops it
            if time.time() - facts.st_mtime > TOUCH:
                os.utime(fd)
            data = os.read(fd, size)
            return data if len(data) == size else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def _path(self, key: str) -> str:
        name = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        return f"{self.folder}/{name[:2]}/{name[2:]}"

    def _get(self, path: Path, size: int, fetch: Fetch) -> BinaryIO | None:
        claim, text, looks = path.with_suffix(".claim"), "", _looks()
        while not text:
            if (file := _open(path, size)) or time.monotonic() < self._pause:
                return file
            if not next(looks):
                return None
            if not self._usage.known:
                self._sweep(0, 0)  # before anything is counted
            path.parent.mkdir(exist_ok=True)
            text = self._claim(claim, size)
        try:
            return _open(path, size) or self._take(path, size, fetch)
        finally:
            claims.drop(claim, text)

    def _claim(self, claim: Path, size: int) -> str:
        """Claim a key. Parts that a killed process left are removed; a complete file stays."""
        killed, left = claims.holder(claim)
        if killed and claims.lives(killed, claim):
            return ""
        text = claims.take(claim, size)
        if text and killed:
            if not claim.with_suffix("").exists():
                self._usage.add(-left)
            for part in claim.parent.glob(f".{claim.stem}.{killed}.*"):
                clear(part)
        return text

    def _take(self, path: Path, size: int, fetch: Fetch) -> BinaryIO | None:
        """Fetch the content of a claimed key, if there is room."""
        file = None
        self._usage.add(size)
        try:
            if self._room(size):
                file = _fetch(path, size, fetch)
            return file
        finally:
            if not file:
                self._usage.add(-size)

    def _room(self, size: int) -> bool:
        """Make room for a file that is already counted; return whether there is room."""
        if self._fits(size) and self._usage.age() < RECOUNT:
            return True
        self._sweep(size, 0)
        if self._fits(size):
            return True
        if _lack(self.folder, size) > 0:
            self._refuse(None)
        return False

    def _fits(self, size: int) -> bool:
        return (
            self._usage.known
            and self._usage.total() <= self.limit
            and _lack(self.folder, size) <= 0
        )

    def _sweep(self, size: int, more: int) -> None:
        """Count the files and make room, or wait until another process has done so.

        Args:
            size: bytes of the file that needs room.
            more: bytes to free in any case.
        """
        claim, text, waited = self.folder / "sweep.claim", "", False
        for _ in _looks():
            try:
                if text := claims.take(claim):
                    break
            except OSError as error:
                if error.errno not in disk.FULL:
                    raise
                break  # no space for the claim: two sweeps at once do no harm
            waited = True
        else:
            return
        try:
            if not (waited and not more and self._fits(size)):
                self._make_room(size, more)
        finally:
            claims.drop(claim, text)

    def _make_room(self, size: int, more: int) -> None:
        since, files = self._usage.position(), Files(self.folder)
        held = files.held + files.claimed
        goal = held - int((1 - SLACK) * self.limit) if held > self.limit else 0
        least = max(goal, _lack(self.folder, size), more)
        self._usage.renew(held - files.evict(least), since)

    def _refuse(self, error: OSError | None) -> None:
        """Cache no new files for a while, and print a line about it."""
        self._pause = time.monotonic() + PAUSE
        why = (error and error.strerror) or f"less than {SPARE:.0%} of the disk would stay free"
        _tell(self.folder, f"cannot cache all data in {self.folder}: {why}")


def _tell(folder: Path, line: str) -> None:
    """Print a line from one process of the node only."""
    mark = folder / "told"
    with contextlib.suppress(OSError):
        if time.time() - mark.stat().st_mtime < QUIET:
            return
    with contextlib.suppress(OSError):
        mark.touch()
    print(f"hpcddp: {line}", file=sys.stderr, flush=True)


def _looks() -> Iterator[bool]:
    """Yield True at growing intervals while another process works, and False after WAIT."""
    deadline, pause = time.monotonic() + WAIT, FIRST_LOOK
    yield True
    while time.monotonic() < deadline:
        time.sleep(pause)
        pause = min(1.5 * pause, LAST_LOOK)
        yield True
    yield False


def _open(path: Path, size: int) -> BinaryIO | None:
    """Open the content if it exists. A file of another size, after a power loss, is removed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    facts = os.fstat(file.fileno())
    if facts.st_size != size:
        file.close()
        path.unlink(missing_ok=True)
        return None
    if time.time() - facts.st_mtime > TOUCH:
        os.utime(file.fileno())
    return file


def _fetch(path: Path, size: int, fetch: Fetch) -> BinaryIO | None:
    """Fetch content aside and rename it into place; None if it has another size."""
    aside = path.with_name(f".{path.name}.{claims.mark()}.{token(4)}.part")
    try:
        with aside.open("xb") as file:
            fetch(file)
        if aside.stat().st_size != size:
            return None
        content = aside.open("rb")
        aside.replace(path)
        return content
    finally:
        aside.unlink(missing_ok=True)


def _lack(folder: Path, size: int) -> int:
    """Bytes to free on the disk before ``size`` more bytes are written; 0 or less if none."""
    free, whole = disk.free(folder)
    return int(SPARE * whole) + size - free


_shared: Cache | None = None


def shared() -> Cache:
    """This process's cache, as its run's job asks. It has no open file or lock: fork is safe."""
    global _shared
    if _shared is None:
        _shared = of_run(os.environ)
    return _shared


def of_run(environ: Mapping[str, str]) -> Cache:
    """The cache of a rank, by its environment. It is off where there can be none."""
    wanted = DataSpec().cache
    try:
        if run := environ.get("HPCDDP_RUN_DIR"):
            job = read_json(RunDir(run).job) or {}
            wanted = job.get("spec", {}).get("data", {}).get("cache", wanted)
        limit = bytes_of(wanted, "data.cache", what="cache", zero=True, bare=True)
        folder = disk.own_folder(environ, "cache") if limit else Path()
        if wanted == DataSpec().cache and limit and disk.in_memory(folder):
            _tell(folder, f"no cache: {folder} is in memory; set TMPDIR to a folder on a disk, or "
                  "data.cache to the memory that the cache may use")  # fmt: skip
            limit = 0
        return Cache(folder, limit)
    except HpcddpError as error:
        print(f"hpcddp: no cache: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return Cache(Path(), 0)
