"""A dashboard as a person starts it, and what its tests ask it with."""

import contextlib
import http.client
import json
import re
import select
import signal
import socket
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sites import COMMAND


class Unix(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=20)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # by their names in small letters
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=lambda word: 1 / 0)


@dataclass
class Dashboard:
    """A process that serves."""

    process: subprocess.Popen[str]
    said: str  # on stdout
    path: str = ""
    port: int = 0
    token: str = ""

    def ask(self, target: str, method: str = "GET", **headers: str) -> Answer:
        """One question; `sec_fetch_site="none"` is a header, None leaves the token out."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token:
            given.setdefault("authorization", f"Bearer {self.token}")
        link = Unix(self.path) if self.path else http.client.HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(link):
            link.putrequest(method, target, skip_host="host" in given, skip_accept_encoding=True)
            for name, value in given.items():
                link.putheader(name, value)
            link.endheaders()
            got = link.getresponse()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())

    def rows(self) -> dict[str, dict[str, Any]]:
        """The list, by name."""
        return {row["run"]: row for row in self.ask("/api/runs").json["runs"]}

    def end(self, number: int = signal.SIGINT) -> int:
        """Its exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(20)


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Dashboard]:
    """`hpcddp dashboard` with these arguments, until the end of the block."""
    process = subprocess.Popen(
        [COMMAND, "dashboard", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL, text=True, encoding="utf-8", errors="surrogateescape",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # under nohup too
    )  # fmt: skip
    assert process.stdout and process.stderr
    try:
        said = "".join(process.stdout.readline() for _ in range(4))
        made = Dashboard(process, said)
        if found := re.search(r"http://127.0.0.1:(\d+)/#token=(\S+)", said):
            made.port, made.token = int(found[1]), found[2]
        elif found := re.search(r"socket: +(\S+)", said):
            made.path = found[1]
        else:
            process.kill()
            raise AssertionError(said + process.stderr.read())
        yield made
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(20)
        process.stdout.close()
        process.stderr.close()


@contextlib.contextmanager
def forwarded(path: str) -> Iterator[str]:
    """The address of a port that leads to a Unix socket, as `ssh -L` makes one."""
    ended = threading.Event()

    class Link(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with socket.socket(socket.AF_UNIX) as far, contextlib.suppress(OSError):
                far.connect(path)
                other = {far: self.request, self.request: far}
                while not ended.is_set():
                    for source in select.select(list(other), [], [], 0.1)[0]:
                        if not (data := source.recv(1 << 16)):
                            return
                        other[source].sendall(data)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Link) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        ended.set()
        server.shutdown()
        thread.join()
