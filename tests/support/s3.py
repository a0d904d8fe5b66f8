"""A real S3 server on this machine for tests, and a door before it that can be shut.

The server is moto's, in a process of its own. What a test reads goes through ``Door``, which
refuses connections, cuts them, or answers 503 or 403 itself while it is told to.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.request import urlopen

import ports

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing-secret",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
ANSWERS = {
    503: ("Slow Down", "SlowDown"),
    500: ("Internal Server Error", "InternalError"),
    403: ("Forbidden", "InvalidAccessKeyId"),
    400: ("Bad Request", "ExpiredToken"),
}
MESSAGES = {
    "InvalidAccessKeyId": "The AWS Access Key Id you provided does not exist in our records.",
    "SignatureDoesNotMatch": "The request signature we calculated does not match the signature you "
    "provided. Check your key and signing method.",
    "AccessDenied": "Access Denied",
    "ExpiredToken": "The provided token has expired.",
    "InvalidToken": "The provided token is malformed or otherwise invalid.",
}


class Door:
    """A TCP proxy. ``requests`` counts what came through, ``refused`` what was turned away."""

    def __init__(self, behind: int) -> None:
        self._port = ports.held()
        self.port = ports.number(self._port)
        self.requests = self.refused = 0
        self._behind, self._answer, self._to = behind, b"", b""
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        """Let everything through (again)."""
        self._answer = b""
        if self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()

    def answer(self, status: int, code: str = "", to: str = "") -> None:
        """Answer every request with an error of the store, or those that have a text in them."""
        self._answer, self._to = _error(status, code), to.encode()

    def shut(self) -> None:
        """Refuse connections, and cut those that there are."""
        listener, self._listener = self._listener, None
        if listener:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for s in list(self._sockets):
            with contextlib.suppress(OSError):
                s.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Shut it for good."""
        self.shut()
        self._port.close()

    def shut_for(self, seconds: float) -> threading.Timer:
        """Shut now, and open after so many seconds."""
        self.shut()
        timer = threading.Timer(seconds, self.open)
        timer.daemon = True
        timer.start()
        return timer

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._carry, args=(client, listener), daemon=True).start()

    def _carry(self, client: socket.socket, listener: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            server = socket.create_connection(("127.0.0.1", self._behind))
            with server:
                pair = {client: server, server: client}
                with self._lock:
                    self._sockets.update(pair)
                try:
                    # Else it was shut meanwhile.
                    while self._listener is listener and self._pass(pair, client):
                        pass
                finally:
                    with self._lock:
                        self._sockets.difference_update(pair)

    def _pass(self, pair: dict[socket.socket, socket.socket], client: socket.socket) -> bool:
        for source in select.select(list(pair), [], [])[0]:
            data = source.recv(1 << 16)
            if not data:
                return False
            if source is client:
                turned, count = self._answer and self._to in data, data.count(b"HTTP/1.1\r\n")
                with self._lock:
                    self.requests += count
                    self.refused += bool(turned)
                if turned:
                    source.sendall(self._answer)
                    return False
            pair[source].sendall(data)
        return True


def _error(status: int, code: str) -> bytes:
    reason, usual = ANSWERS[status]
    code = code or usual
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>'
        f"<Error><Code>{code}</Code><Message>{MESSAGES.get(code, reason)}</Message></Error>"
    ).encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


class Server:
    """moto's server; ``put`` fills it, past the door."""

    def __init__(self, port: int) -> None:
        self.port, self.door = port, Door(port)

    @property
    def environ(self) -> dict[str, str]:
        """What a job needs to read from it, through the door."""
        return KEYS | {"AWS_ENDPOINT_URL_S3": self.door.url}

    def client(self, **options: Any) -> Any:
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            region_name=KEYS["AWS_REGION"],
            **options,
        )

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """Objects of a bucket, which is made."""
        client = self.client()
        client.create_bucket(Bucket=bucket)
        for name, data in objects.items():
            client.put_object(Bucket=bucket, Key=name, Body=data)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server on a free port; its process is ended with the context."""
    place = ports.held()
    port = ports.number(place)
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")} | KEYS
    process = subprocess.Popen(
        words, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{port}/moto-api/"):
                break
            assert process.poll() is None and time.monotonic() < end, "moto did not start"
            time.sleep(0.05)
        server = Server(port)
        try:
            yield server
        finally:
            server.door.close()
    finally:
        process.kill()
        process.wait()
        place.close()
