"""The store of Horovod's ranks: where each leaves its addresses for the others.

    python -P -m hpcddp.launch.horovod_rendezvous LAUNCHER...

It becomes the launcher, srun or spawn.py, so that signals, output and exit code are that one's
own. The store is a process beside it, which the kernel ends with the launcher, however that ends.
It answers what a rank asks of the server that `horovodrun --gloo` has: put a value, read one that
may not be there yet, and take the own one back when all have read it.
"""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, NoReturn

from hpcddp.launch.command import execute
from hpcddp.preempt import ignore_stop_signals
from hpcddp.processes import die_with_parent


class RendezvousServer(ThreadingTCPServer):
    """Values by their paths, on a port that is free."""

    daemon_threads = True
    request_queue_size = 1024  # the ranks come all at once

    def __init__(self) -> None:
        super().__init__(("", 0), Request)
        self.values: dict[str, bytes] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A rank that went in the middle of a request: its launcher tells."""


class Request(BaseHTTPRequestHandler):
    """One question of a rank's."""

    timeout = 60.0
    server: RendezvousServer

    def do_PUT(self) -> None:
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(self.server.values.get(self.path))

    def do_DELETE(self) -> None:
        self.server.values.pop(self.path, None)
        self._answer(b"")

    def _answer(self, value: bytes | None) -> None:
        self.send_response(HTTPStatus.NOT_FOUND if value is None else HTTPStatus.OK)
        self.send_header("Content-Length", str(len(value or b"")))
        self.end_headers()
        self.wfile.write(value or b"")

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing in the job's log."""


def main(command: list[str]) -> int:
    """Start the store, and become the launcher."""
    store, launcher = RendezvousServer(), os.getpid()
    if os.fork() == 0:
        _serve(store, launcher)
    where = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.server_address[1]),
    }
    return execute(command, {**os.environ, **where})


def _serve(store: RendezvousServer, launcher: int) -> NoReturn:
    """Answer as long as the launcher lives. A stop signal is for the ranks."""
    die_with_parent()
    ignore_stop_signals()
    if os.getppid() == launcher:
        store.serve_forever()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
