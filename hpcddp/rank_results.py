"""What a person's code on any rank leaves where people look: RUN/results.

    hpcddp.submit_result(f"worker/{rank}/step-{step}.json", json.dumps(facts))
    hpcddp.submit_result("samples.png", Path("/tmp/samples.png"))

A result is there whole or not at all, once per path: a later one takes the place of an earlier one.
It is written aside in its attempt's own folder, which the next attempt takes away: from then on an
older life that still runs writes no more (attempt/fence.py).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from hpcddp.errors import HpcddpError, LeaseLost, UserError
from hpcddp.rundir import AttemptDir, RunDir, written

FOLDER = "results"  # of the current folder, outside of a job
PIECE = 1 << 20  # bytes of a file that are copied at once
# What a path can be blamed for, and not the disk.
PATH_ERRORS = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG}

Data = bytes | str | os.PathLike[str]

_home: tuple[RunDir, int] | None = None  # the run that this process trains, and its attempt


@contextlib.contextmanager
def of(run: RunDir, attempt: int) -> Iterator[None]:
    """Results belong to this run meanwhile, whatever the environment says."""
    global _home
    before, _home = _home, (run, attempt)
    try:
        yield
    finally:
        _home = before


def submit_result(path: str, data: Data) -> None:
    """Leave a file in the run, from any rank: it is RUN/results/PATH when this returns. Outside of
    a job it is results/PATH in the current folder.

    Args:
        path: a relative one. A later result takes the place of an earlier one, also of one from
            before a preemption: name it by rank and step.
        data: bytes, text (written as UTF-8), or the Path of a local file, which is copied.

    Raises:
        UserError: the path leaves the folder, or there is no such file or data.
        HpcddpError: it cannot be written: the disk is full, say. An earlier one stays.
        LeaseLost: a newer attempt owns the run dir.
    """
    home = _home or _from_environment()
    folder = home[0].results if home else Path(FOLDER)
    place(folder, path, data, life(folder))


def life(folder: Path) -> AttemptDir | None:
    """The attempt that writes in a folder, where that lies in its run; a link may lead out, to
    another file system."""
    home = _home or _from_environment()
    if home and folder.resolve().is_relative_to(home[0].path.resolve()):
        return home[0].attempt(home[1])
    return None


def _from_environment() -> tuple[RunDir, int] | None:
    """The run and the attempt that the environment names."""
    if folder := os.environ.get("HPCDDP_RUN_DIR"):
        return RunDir(folder), int(os.environ.get("HPCDDP_ATTEMPT", "1"))
    return None


def check(path: str) -> None:
    """A path stays in its folder, wherever that is.

    Raises:
        UserError: it does not.
    """
    if not isinstance(path, str):
        raise UserError(
            f"the path of a result is text, and not {type(path).__name__}", where="submit_result"
        )
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise UserError(
            f"the path {path!r} leaves the folder of results, or names none of its files",
            where="submit_result",
            hint="give a relative one without ..",
        )


def place(folder: Path, path: str, data: Data, attempt: AttemptDir | None = None) -> None:
    """Write one result; a link in the folder does not lead out of it either.

    Args:
        attempt: whose life it is: it writes nothing more once a newer one has begun.

    Raises:
        UserError, HpcddpError, LeaseLost: see ``submit_result``.
    """
    check(path)
    target = folder / path
    with opened(path, data) as source:
        try:
            if not target.parent.resolve().is_relative_to(folder.resolve()):
                raise UserError("a link leads out of the folder of results", where=str(target))
            if attempt is None:
                folder.mkdir(parents=True, exist_ok=True)
            with written(target, desk=attempt.sending if attempt else folder) as file:
                shutil.copyfileobj(source, file, PIECE)
                target.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError, UnicodeError) as error:  # resolve: a loop of links
            raise _failed(error, target, attempt) from None


def opened(path: str, data: Data) -> contextlib.AbstractContextManager[IO[bytes]]:
    """The data to read from.

    Raises:
        UserError: it is none of these, or there is no such file.
    """
    if isinstance(data, str):
        try:
            return io.BytesIO(data.encode())
        except UnicodeEncodeError as error:
            raise UserError(f"a result is no text: {error.reason}", where=path) from None
    if isinstance(data, bytes):
        return io.BytesIO(data)
    if not isinstance(data, os.PathLike):
        raise UserError(
            f"a result is bytes, text or the Path of a file, and not {type(data).__name__}",
            where=path,
            hint="json.dumps and pickle.dumps make them",
        )
    file = Path(data)
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # to open a pipe may wait for ever
            raise UserError("a result is a file, and this is none", where=str(file))
        return file.open("rb")
    except OSError as error:
        what = f"a result cannot be read: {error.strerror}"
        raise UserError(what, where=str(file)) from None


def _failed(error: Exception, target: Path, attempt: AttemptDir | None) -> HpcddpError:
    """The error of a result that could not be written."""
    if attempt and attempt.path.exists() and not attempt.sending.exists():
        return LeaseLost(
            f"attempt {attempt.number} may not write here any more: a newer one has begun",
            where=str(target),
        )
    number = error.errno if isinstance(error, OSError) else None
    what = f"a result cannot be written: {getattr(error, 'strerror', None) or error}"
    if number is None or number in PATH_ERRORS:
        hint = "another result may have taken a folder of its path for its name"
        return UserError(what, where=str(target), hint=hint)
    return HpcddpError(what, where=str(target), hint="results that came before it are there")
