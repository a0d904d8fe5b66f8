"""The store of Horovod's ranks: where each leaves its addresses for the others.

    python -P -m hpcddp.launch.horovod_rendezvous LAUNCHER...

This process is replaced by the launcher, srun or spawn.py, so signals, output and exit code are the
launcher's. The store is a child process, which the kernel ends with the launcher. It answers the
requests that a rank makes of the server of `horovodrun --gloo`: put a value, read a value that may
not be there yet, and remove the rank's own value when all have read it.
"""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, NoReturn

from hpcddp.attempt import exit_codes
from hpcddp.launch.command import execute, not_started
from hpcddp.preempt import ignore_stop_signals
from hpcddp.processes import die_with_parent


class RendezvousServer(ThreadingTCPServer):
    """Values by their paths, on a port that is free."""

    daemon_threads = True
    request_queue_size = 1024  # all ranks connect at once

    def __init__(self) -> None:
        super().__init__(("", 0), Request)
        self.values: dict[str, bytes] = {}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a rank that ended during a request: its launcher reports it."""


class Request(BaseHTTPRequestHandler):
    """One request of a rank."""

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
        """Write nothing into the job's log."""


def main(command: list[str]) -> int:
    """Start the store, then run the launcher in this process."""
    store, launcher = RendezvousServer(), os.getpid()
    if os.fork() == 0:
        _serve(store, launcher)
    where = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": os.environ["MASTER_ADDR"],
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store.server_address[1]),
    }
    try:
        execute(command, {**os.environ, **where})
    except OSError as error:
        print(f"hpcddp: {not_started(command, error)}", file=sys.stderr, flush=True)
    return exit_codes.FAILED


def _serve(store: RendezvousServer, launcher: int) -> NoReturn:
    """Answer while the launcher runs. A stop signal is for the ranks."""
    die_with_parent()
    ignore_stop_signals()
    if os.getppid() == launcher:
        store.serve_forever()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
