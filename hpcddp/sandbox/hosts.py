"""Sandbox: its marked lines in /etc/hosts, so that node names resolve, as on a real cluster.

Each line ends in `# hpcddp-sandbox=FOLDER`. The file is locked and rewritten in place: in a
container it is a mount of its own, which cannot be replaced by renaming.
"""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from urllib.parse import quote, unquote

from hpcddp.errors import SandboxError
from hpcddp.sandbox.config import ADDRESS

HOSTS = Path("/etc/hosts")
MARK = "# hpcddp-sandbox="
MAX_SANDBOXES = 99


def claim(folder: Path, count: int, live: Callable[[Path], bool], path: Path = HOSTS) -> str:
    """Write the lines of a sandbox; returns the prefix of its node names.

    Lines of sandboxes that are no longer `live` are removed.
    """
    with _locked(path) as file:
        text = file.read()
        gone = {owner for owner in owners(text) if owner == folder or not live(owner)}
        text = without(text, gone)
        prefix = choose(text, count)
        # One line for each: a look-up returns the first name of a line.
        names = [*(f"{prefix}{k}" for k in range(1, count + 1)), f"{prefix}ctl"]
        lines = [f"{ADDRESS} {name} {_mark(folder)}" for name in names]
        body = text if text.endswith("\n") or not text else text + "\n"
        _rewrite(file, body + "\n".join(lines) + "\n")
    return prefix


def release(folder: Path, path: Path = HOSTS) -> None:
    """Remove the lines of a sandbox."""
    with _locked(path) as file:
        text = file.read()
        if folder in owners(text):
            _rewrite(file, without(text, {folder}))


def owners(text: str) -> set[Path]:
    """The folders of the sandboxes that have lines here."""
    marks = (line.partition(MARK) for line in text.splitlines())
    return {Path(unquote(owner)) for _, mark, owner in marks if mark}


def without(text: str, folders: set[Path]) -> str:
    """The text without the lines of these sandboxes."""
    marks = {_mark(folder) for folder in folders}
    return "".join(
        line for line in text.splitlines(keepends=True) if not line.rstrip().endswith(tuple(marks))
    )


def choose(text: str, count: int) -> str:
    """A prefix for `count` node names that are free here."""
    words = [line.partition("#")[0].split() for line in text.splitlines()]
    names = {name for entry in words for name in entry[1:]}
    for number in range(1, MAX_SANDBOXES + 1):
        prefix = "n" if number == 1 else f"sb{number}n"
        if names.isdisjoint(f"{prefix}{k}" for k in range(1, count + 1)):
            return prefix
    message = f"{MAX_SANDBOXES} sandboxes already have names here"
    raise SandboxError(message, where=str(HOSTS), hint="end one with `hpcddp sandbox down`")


def _mark(folder: Path) -> str:
    return MARK + quote(str(folder))


@contextmanager
def _locked(path: Path) -> Iterator[TextIOWrapper]:
    try:
        with path.open("r+", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
    except OSError as error:
        message = f"cannot change this file, for the names of nodes: {error.strerror}"
        raise SandboxError(message, where=str(path)) from error


def _rewrite(file: TextIOWrapper, text: str) -> None:
    file.seek(0)
    file.write(text)
    file.truncate()
