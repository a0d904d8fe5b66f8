"""Messages between processes of one job: JSON objects, one per line, over a socket.

Other users reach a TCP port, so both ends first prove that they know the job's secret (HMAC with
SHA-256, RFC 2104), and nothing of a stranger is parsed. A socket of this machine has a name without
a file (abstract, unix(7)), and takes in processes of the same user alone (SO_PEERCRED).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import select
import socket
import struct
import time
from typing import Any

from hpcddp.processes import start_of

LONGEST = 1 << 20  # bytes of a line
PROOF = 1 << 10  # bytes of the first line of an unknown peer
LEAVE = 2.0  # seconds to wait for a supervisor's leave: Slurm may be ending the job
PATIENCE = 600.0  # seconds until a supervisor must have answered
TIMEOUT = 10.0  # seconds for a connection and its proof

Message = dict[str, Any]


class Channel:
    """One end of a connection. Nothing here blocks.

    Args:
        sock: a connected socket.
        secret: that the peer must prove to know before its first message counts; "" if it has.
    """

    def __init__(self, sock: socket.socket, secret: str = "") -> None:
        sock.setblocking(False)
        self._socket, self._secret = sock, secret
        self._rest = self._unsent = b""  # of a line that has come, and of those to be sent
        self.closed = False  # by either end, or as the peer is not of this job
        self._nonce = secrets.token_hex(16).encode()
        if secret:
            self._put_line(self._nonce)

    @property
    def proven(self) -> bool:
        """Whether the peer has shown that it belongs to the job."""
        return not self._secret

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message. It is lost if the peer has left, or takes nothing in."""
        if self.proven:
            self._put_line(json.dumps(message).encode())

    def receive(self) -> list[Message]:
        """The messages that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            while not self.closed:
                data = self._read()
                self._rest += data
                if not data or len(self._rest) > (LONGEST if self.proven else PROOF):
                    self.close()
        *lines, self._rest = self._rest.split(b"\n")
        messages = []
        for line in lines:
            if not self.proven:
                if self.closed or not self._check(line):
                    self.close()
                    break
            else:
                messages.append(_message(line))
        return messages

    def close(self) -> None:
        """End the connection."""
        self.closed, self._unsent = True, b""
        self._socket.close()

    def _read(self) -> bytes:
        try:
            return self._socket.recv(1 << 16)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def _put_line(self, line: bytes) -> None:
        self._unsent += line + b"\n"
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:  # the rest goes with the next message
            if len(self._unsent) > LONGEST:
                self.close()
        except OSError:
            self.close()

    def _check(self, line: bytes) -> bool:
        """Whether a line is the proof of a peer; it is answered with one."""
        nonce, _, proof = line.partition(b" ")
        if not hmac.compare_digest(proof, _proof(self._secret, b"peer", self._nonce, nonce)):
            return False
        secret, self._secret = self._secret, ""
        self._put_line(_proof(secret, b"host", nonce, self._nonce))
        return True


def connect(host: str, port: int, secret: str, timeout: float = TIMEOUT) -> Channel:
    """Connect to a process of the job on another node.

    Raises:
        OSError: it does not answer, or does not know the secret.
    """
    sock = socket.create_connection((host, port), timeout)
    try:
        with sock.makefile("rb") as lines:
            theirs, mine = lines.readline(PROOF).strip(), secrets.token_hex(16).encode()
            sock.sendall(mine + b" " + _proof(secret, b"peer", theirs, mine) + b"\n")
            answer = lines.readline(PROOF).strip()
        if not hmac.compare_digest(answer, _proof(secret, b"host", mine, theirs)):
            raise ConnectionRefusedError(f"{host}:{port} is not of this job")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Channel(sock)
    except BaseException:
        sock.close()
        raise


def reach(address: str, secret: str) -> Channel:
    """Connect to HOST:PORT, which may be slow.

    Raises:
        OSError: it does not answer for ten minutes.
    """
    host, _, port = address.rpartition(":")
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return connect(host, int(port), secret)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(1.0)


def listen_here(name: str) -> socket.socket:
    """A listening socket of this machine.

    Raises:
        OSError: another process has the name.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0{name}")
        sock.listen()
    except BaseException:
        sock.close()
        raise
    return sock


def hold(name: str) -> None:
    """Wait until no process of this machine has a name, and take it, for as long as this process
    lives, or one that it forks from now on."""
    while True:
        try:
            listen_here(name).detach()
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # this machine gives none
                return
        time.sleep(0.1)


def connect_here(name: str) -> Channel:
    """Connect to a process of this machine and this user.

    Raises:
        OSError: there is none.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(TIMEOUT)
        sock.connect(f"\0{name}")
        if not of_this_user(sock):
            raise ConnectionRefusedError(f"{name} is of another user")
        return Channel(sock)
    except BaseException:
        sock.close()
        raise


def door_of(script: int) -> str:
    """The name of the socket at which the supervisor of a batch script answers (supervisor.py)."""
    return f"hpcddp-{script}-{start_of(script)}"


def dismiss(script: int) -> None:
    """Let the parents of a batch script's ranks leave, if it has any, and wait until they have.
    They outlive an attempt, and Slurm would wait for them at the end of the job."""
    with contextlib.suppress(OSError):
        supervisor = connect_here(door_of(script))
        supervisor.send(leave=True)
        until = time.monotonic() + LEAVE
        while not supervisor.closed and time.monotonic() < until:
            select.select([supervisor], [], [], 0.1)
            supervisor.receive()


def of_this_user(sock: socket.socket) -> bool:
    """Whether the peer of a socket of this machine is a process of this user."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(uid == os.getuid())


def own(sock: socket.socket) -> bool:
    """Whether a connection on this machine is of this user; another one is closed."""
    if not of_this_user(sock):
        sock.close()
        return False
    return True


def _message(line: bytes) -> Message:
    return dict(json.loads(line))


def _proof(secret: str, role: bytes, *nonces: bytes) -> bytes:
    text = b":".join((role, *nonces))
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest().encode()
