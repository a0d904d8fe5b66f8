"""Results: files that the user's code on any rank writes to RUN/results.

    hpcddp.submit_result(f"worker/{rank}/step-{step}.json", json.dumps(facts))
    hpcddp.submit_result("samples.png", Path("/tmp/samples.png"))

A result is complete or missing, and a later result replaces an earlier one with the same path. It
is first written to a folder of its attempt. The next attempt removes that folder, after which the
superseded attempt can no longer write (attempt/fence.py).
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
PIECE = 1 << 20  # bytes copied at once
# Errors that the path causes, not the disk.
PATH_ERRORS = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG}

Data = bytes | str | os.PathLike[str]

_home: tuple[RunDir, int] | None = None  # the run that this process trains, and its attempt


@contextlib.contextmanager
def of(run: RunDir, attempt: int) -> Iterator[None]:
    """Within this context results belong to this run, whatever the environment says."""
    global _home
    before, _home = _home, (run, attempt)
    try:
        yield
    finally:
        _home = before


def submit_result(path: str, data: Data) -> None:
    """Write a file to RUN/results/PATH, from any rank. Outside of a job it is results/PATH in the
    current folder.

    Args:
        path: a relative path. A later result replaces an earlier one with the same path, also one
            from before a preemption: name it by rank and step.
        data: bytes, a string (written as UTF-8), or the Path of a local file, which is copied.

    Raises:
        UserError: the path leaves the folder, the file does not exist, or the data has another
            type.
        HpcddpError: the result cannot be written, for example on a full disk. An earlier one stays.
        LeaseLost: a newer attempt owns the run folder.
    """
    home = _home or _from_environment()
    folder = home[0].results if home else Path(FOLDER)
    place(folder, path, data, writing_attempt(folder))


def writing_attempt(folder: Path) -> AttemptDir | None:
    """The attempt that writes to a folder in its run; None for a folder elsewhere, which a link
    may lead to."""
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
    """Check that a path stays in its folder.

    Raises:
        UserError: it leaves the folder.
    """
    if not isinstance(path, str):
        raise UserError(
            f"the path of a result must be a string, got {type(path).__name__}",
            where="submit_result",
            hint="write it as a string, such as 'samples.png'",
        )
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\0" in path:
        raise UserError(
            f"the path {path!r} is not that of a file in the folder of results",
            where="submit_result",
            hint="use a relative path without ..",
        )


def place(folder: Path, path: str, data: Data, attempt: AttemptDir | None = None) -> None:
    """Write one result; links must not leave the folder either.

    Args:
        attempt: the writing attempt, which cannot write after a newer one has begun.

    Raises:
        UserError, HpcddpError, LeaseLost: see ``submit_result``.
    """
    check(path)
    target = folder / path
    with opened(path, data) as source:
        try:
            if not target.parent.resolve().is_relative_to(folder.resolve()):
                raise UserError("a link leaves the folder of results", where=str(target),
                                hint="use a path without links")  # fmt: skip
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
        UserError: it has another type, or the file does not exist.
    """
    if isinstance(data, str):
        try:
            return io.BytesIO(data.encode())
        except UnicodeEncodeError as error:
            what = f"a result is not valid text: {error.reason}"
            raise UserError(what, where=path, hint="encode it to bytes") from None
    if isinstance(data, bytes):
        return io.BytesIO(data)
    if not isinstance(data, os.PathLike):
        raise UserError(
            f"a result must be bytes, a string or the Path of a file, got {type(data).__name__}",
            where=path,
            hint="use json.dumps or pickle.dumps",
        )
    file = Path(data)
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe may wait forever
            raise UserError("a result must be a regular file", where=str(file))
        return file.open("rb")
    except OSError as error:
        what = f"cannot read the file: {error.strerror}"
        hint = "check the path and the permissions of the file"
        raise UserError(what, where=str(file), hint=hint) from None


def _failed(error: Exception, target: Path, attempt: AttemptDir | None) -> HpcddpError:
    """The error of a result that could not be written."""
    if attempt and attempt.path.exists() and not attempt.sending.exists():
        return LeaseLost(
            f"attempt {attempt.number} is superseded and can no longer write here",
            where=str(target),
        )
    number = error.errno if isinstance(error, OSError) else None
    what = f"cannot write the result: {getattr(error, 'strerror', None) or error}"
    if number is None or number in PATH_ERRORS:
        hint = "use another path: a part of it may be the name of another result"
        return UserError(what, where=str(target), hint=hint)
    return HpcddpError(
        what, where=str(target), hint="earlier results stay; free space or check the disk"
    )
