"""The dashboard listens on a Unix socket for its owner alone, or on a port of loopback."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shlex
import socket
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import UserError

LONGEST = 107  # bytes of a Unix socket's path, see unix(7)
LOCAL = "127.0.0.1"  # not a name: another user may listen on another address of that name
FORWARDED = 8080  # port on the user's own computer, in the printed commands
OTHER = "choose another path with --socket"


@dataclass(frozen=True)
class Listener:
    """A listening socket and its address."""

    listener: socket.socket
    address: str  # path, or host and port
    token: str | None  # required in every request for data

    def lines(self, host: str) -> list[tuple[str, str]]:
        """The commands and addresses for a person, each with the place to use it."""
        if self.token is None:
            far = f"ssh -L {FORWARDED}:{shlex.quote(self.address)} {host}"
            return [
                ("socket", self.address),
                ("on your own machine", far),
                ("in its browser", f"http://localhost:{FORWARDED}/"),
            ]
        port = self.address.rpartition(":")[2]
        return [
            ("on this machine", f"http://{self.address}/#token={self.token}"),
            ("on your own machine", f"ssh -L {FORWARDED}:{LOCAL}:{port} {host}"),
            ("in its browser", f"http://{LOCAL}:{FORWARDED}/#token={self.token}"),
        ]


@contextlib.contextmanager
def on_port(port: int) -> Iterator[Listener]:
    """Listen on a port of loopback; 0 is any free port.

    Raises:
        UserError: the port is not free.
    """
    with socket.socket(socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOCAL, port))
            listener.listen()
        except OSError as error:
            message = f"cannot listen here: {error.strerror}"
            hint = "use --port 0 for any free port, or leave --port out to use a Unix socket"
            raise UserError(message, where=f"port {port}", hint=hint) from None
        address = f"{LOCAL}:{listener.getsockname()[1]}"
        yield Listener(listener, address, secrets.token_urlsafe(32))


@contextlib.contextmanager
def on_socket(path: Path) -> Iterator[Listener]:
    """Listen on a Unix socket of mode 0600, and remove it at the end.

    Raises:
        UserError: its path is too long, other users could replace it, or a process already
            listens on it.
    """
    path = _settled(path.parent) / path.name
    if len(os.fsencode(path)) > LONGEST:
        message = (
            f"the path of a socket must be at most {LONGEST} bytes, got {len(os.fsencode(path))}"
        )
        raise UserError(message, where=str(path), hint="choose a shorter path with --socket")
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            _bind(listener, path)
        except OSError as error:
            message = f"cannot listen here: {error.strerror}"
            raise UserError(message, where=str(path), hint=OTHER) from None
        own = path.lstat().st_ino
        try:
            yield Listener(listener, str(path), None)
        finally:
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == own:
                    path.unlink()


def _bind(listener: socket.socket, path: Path) -> None:
    """Bind and listen; replaces the socket of a dead dashboard."""
    before = os.umask(0o177)
    try:
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _stale(path):
                raise
            path.unlink()
            listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen()


def _stale(path: Path) -> bool:
    """Whether no process listens on a socket.

    Raises:
        UserError: one does, or the file is no socket.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise UserError("this file is not a socket", where=str(path), hint=OTHER)
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return True
    hint = f"use that dashboard, stop it, or {OTHER}"
    raise UserError("a dashboard already listens on this socket", where=str(path), hint=hint)


def _settled(folder: Path) -> Path:
    """A folder without symbolic links, which others might change.

    Raises:
        UserError: the folder is missing, or other users could replace the socket in it.
    """
    try:
        settled = folder.resolve(strict=True)
        weak = _weak(settled)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error  # a loop of links has none
        message = f"cannot use this folder for the socket: {reason}"
        raise UserError(message, where=str(folder), hint=OTHER) from None
    if weak:
        raise UserError(
            "other users can write to this folder, so they could replace the socket",
            where=str(weak),
            hint=f"{OTHER}, in a folder that only you can write to",
        )
    return settled


def _weak(folder: Path) -> Path | None:
    """The first folder, among this one and all above it, in which others can replace files."""
    if not private(folder.stat(), 0o022):
        return folder
    trusted = {os.geteuid(), 0, Path("/").stat().st_uid}  # in a container root has another number
    for above in folder.parents:
        facts = above.stat()
        # In a sticky folder, as /tmp is, only its owner can move a file.
        open_ = facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX
        if facts.st_uid not in trusted or open_:
            return above
    return None


def private(facts: os.stat_result, mask: int) -> bool:
    """Whether a folder belongs to the user, and others have none of these permissions."""
    return facts.st_uid == os.geteuid() and not stat.S_IMODE(facts.st_mode) & mask


def own_path(root: Path) -> Path:
    """The socket for a folder of runs: always the same path, which only the user can open.

    It lies on this machine: a shared file system may not support sockets.
    """
    digest = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:10]
    name = f"dashboard-{digest}.sock"
    temporary = Path(tempfile.gettempdir())
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folders = [Path(runtime, "hpcddp")] if runtime else []
    folders += [top / f"hpcddp-{os.geteuid()}" for top in (temporary, Path("/tmp"))]
    for folder in folders:
        short = len(os.fsencode(folder / name)) <= LONGEST
        if short and _made(folder) and not _weak(folder.resolve()):
            return folder / name
    return Path(tempfile.mkdtemp(prefix="hpcddp-", dir="/tmp")) / name


def _made(folder: Path) -> bool:
    """Make a folder that only the user can enter; whether it is such a folder now."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()
        return stat.S_ISDIR(facts.st_mode) and private(facts, 0o077)
    return False
