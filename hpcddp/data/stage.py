"""Staging: data is copied to a node's own disk once, before the training reads it.

    BASE/                    hpcddp-stage-UID on the node's own disk, mode 0700
      RUN/
        run                  path of the run folder: staged data is removed when its run has ended
        NODE/
          NAME/...           each entry of data.stage by the last part of its path
          .parts/HASH        the first bytes of a file that is being copied
          .owner .ended-N    the process that copies and then trains; its outcome (node_wait.py)

A copy has the size and the modification time of its source. So a complete copy is not repeated, and
a changed source is copied again. A partial copy is continued, also in the next attempt.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.attempt.error_record import host
from hpcddp.data import sources
from hpcddp.data.names import name_of
from hpcddp.data.node_cache import claims, disk
from hpcddp.data.node_cache.leftovers import clear
from hpcddp.data.pool import Pool
from hpcddp.data.sources import File, Source
from hpcddp.errors import HpcddpError, StageError, UserError
from hpcddp.rundir import RunDir, write_json, write_text
from hpcddp.sizes import amount
from hpcddp.topology import Rank

THREADS = 8
LOOK = 0.2  # seconds between two checks of the threads
SAY = 5.0  # seconds between two progress lines
BLOCK = 4096  # bytes of disk space that the smallest file uses
SPARE = 0.01  # part of the disk that stays free


def folder_of(run: RunDir, rank: Rank, *, local: bool, environ: Mapping[str, str]) -> Path:
    """The folder of a run's data on this node, which is made. Each virtual node has its own.

    Args:
        local: the nodes are virtual nodes of this machine.

    Raises:
        UserError: the folder cannot be made.
    """
    base = disk.own_folder(environ, "stage")
    unique = hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]
    node = f"{host()}-{rank.node}" if local else host()
    folder = base / f"{run.name}-{unique}" / node
    mark = folder.parent / "run"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists():
            write_text(mark, str(run.path))
    except OSError as error:
        hint = "set TMPDIR in [env] to a folder on the node's own disk"
        what = f"cannot make the folder: {error.strerror}"
        raise UserError(what, where=str(folder), hint=hint) from None
    return folder


class _Item(NamedTuple):
    """One file to copy. There may be a million of them."""

    entry: str
    source: Source
    file: File

    @property
    def where(self) -> str:
        """The path or URL of the source, for messages."""
        return f"{self.entry.rstrip('/')}/{self.file.name}" if self.file.name else self.entry


class StagedCopy:
    """One node's copy of the data that a run stages.

    Args:
        folder: result of `folder_of`.
        entries: of data.stage.
        patience: seconds to retry while a store does not answer.
        turn: a name of this staging that the waiting ranks know (node_wait.py).
    """

    def __init__(
        self, folder: Path, entries: Sequence[str], patience: float, turn: str = ""
    ) -> None:
        self.folder, self._entries, self._patience = folder, entries, patience
        self.owner, self.turn = folder / ".owner", turn
        self._parts = folder / ".parts"
        self._over = threading.Event()
        self._lock = threading.Lock()
        self.signs = 0  # grows with each listed file and each copied block
        self._total = self._there = self._got = 0  # bytes: all, present at the start, copied since
        self._need = 0  # bytes of disk space

    def copy(self, wanted: Callable[[], bool]) -> bool:
        """Copy the missing files; return False if ``wanted`` ended the copy early.

        Args:
            wanted: whether to continue; called by this thread, five times a second.

        Raises:
            UserError: there is not enough space, or a source is not readable.
            StageError: a source changed during the copy.
        """
        with Pool(THREADS) as pool:  # never joined: a thread may wait minutes for a store
            try:
                write_json(self.owner, {"who": claims.mark(), "turn": self.turn})
                look = pool.submit(self._look)
                if not self._wait([look], wanted):
                    return False
                self._check_room()
                began, rest = time.monotonic(), iter(look.result())
                work = [pool.submit(lambda: self._work(rest)) for _ in range(THREADS)]
                if not self._wait(work, wanted, began):
                    return False
            except OSError as error:
                raise self._error(error) from None
            finally:
                self._over.set()
        shutil.rmtree(self._parts, ignore_errors=True)
        self._say_end(time.monotonic() - began)
        return True

    def _wait(
        self, work: Sequence[Future[Any]], wanted: Callable[[], bool],
        began: float = 0.0,
    ) -> bool:  # fmt: skip
        """Wait until all threads have ended; raise the first error. False if not wanted."""
        printed, busy = time.monotonic(), set(work)
        while busy:
            done, busy = wait(busy, LOOK, FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not wanted():
                self._over.set()
                return False
            if began and time.monotonic() - printed >= SAY:
                printed = time.monotonic()
                self._say(printed - began)
        return True

    def _look(self) -> list[_Item]:
        """List the missing files."""
        clear(self.folder.parent.parent, self.folder.parent)
        self._parts.mkdir(exist_ok=True)
        missing = []
        for entry in self._entries:
            source = sources.source(entry, self._patience)
            for file in source.find():
                if self._over.is_set():
                    return []
                self.signs += 1
                if ".." in file.name.split("/"):  # a key of a store may be anything
                    raise UserError(f"{file.name!r} leads out of the staging folder", where=entry,
                                    hint="rename the object")  # fmt: skip
                item = _Item(entry, source, file)
                self._total += file.size
                if _complete(self._target(item), file):
                    self._there += file.size
                else:
                    missing.append(item)
                    self._there += (got := _size(self._part(item)))
                    self._need += -(-file.size // BLOCK) * BLOCK - got
        return missing

    def _target(self, item: _Item) -> Path:
        return self.folder / name_of(item.entry) / item.file.name

    def _part(self, item: _Item) -> Path:
        words = f"{item.entry}\0{item.file.name}\0{item.file.size}\0{item.file.stamp}"
        return (
            self._parts / hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        )

    def _check_room(self) -> None:
        free, whole = disk.free(self.folder)
        if self._need > free - int(SPARE * whole):
            raise self._no_room(self._need, free)

    def _no_room(self, need: int, free: int) -> UserError:
        where = " of memory" if disk.in_memory(self.folder) else ""
        return UserError(
            f"no space to stage the data: {amount(need)} needed, {amount(free)}{where} free",
            where=f"{self.folder} on {host()}",
            hint="stage less, request nodes with more space, or set TMPDIR in [env] to another "
            "disk; without data.stage, hpcddp reads the data from its source",
        )

    def _work(self, rest: Iterator[_Item]) -> None:
        """Copy one file after another. A failure also ends the other threads."""
        try:
            while not self._over.is_set():
                with self._lock:
                    item = next(rest, None)
                if item is None:
                    return
                self._fetch(item)
        except BaseException:
            self._over.set()
            raise

    def _error(self, error: OSError) -> HpcddpError:
        """Translate an error of a disk, here or at the source."""
        if error.errno in disk.FULL:
            left = self._total - self._there - self._got
            return self._no_room(left, disk.free(self.folder)[0])
        kind = UserError if isinstance(error, PermissionError) else StageError
        return kind(f"cannot stage: {error.strerror or error}",
                    where=str(error.filename or self.folder))  # fmt: skip

    def _fetch(self, item: _Item) -> None:
        file, part, target = item.file, self._part(item), self._target(item)
        with part.open("ab") as out:
            for data in item.source.read(file, out.tell()):
                if self._over.is_set():  # another attempt may be copying by now
                    return
                out.write(data)
                with self._lock:
                    self._got += len(data)
                    self.signs += 1
        if (got := _size(part)) != file.size:
            part.unlink()
            raise StageError(f"expected {file.size} bytes, got {got}", where=item.where,
                             hint="do not change the data while it is staged")  # fmt: skip
        part.chmod(file.mode)
        os.utime(part, ns=(file.stamp, file.stamp))
        target.parent.mkdir(parents=True, exist_ok=True)
        part.replace(target)

    def _say(self, seconds: float) -> None:
        done, rate = self._there + self._got, self._got / seconds
        text = f"{host()}: staged {amount(done)} of {amount(self._total)}, {amount(rate)}/s"
        if rate:
            text += f", {(self._total - done) / rate:.0f} s left"
        print(text, flush=True)

    def _say_end(self, seconds: float) -> None:
        text = f"{host()}: staged {amount(self._total)}"
        if not self._got:
            text += ", all of it already present"
        else:
            text += f" in {seconds:.1f} s, {amount(self._got / max(seconds, 1e-3))}/s"
            text += f"; {amount(self._there)} of it already present" if self._there else ""
        print(text, flush=True)


def _complete(target: Path, file: File) -> bool:
    try:
        facts = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (facts.st_size, facts.st_mtime_ns) == (file.size, file.stamp)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
