"""The sockets and pipes of one process, and what is called when they can be read."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable

from hpcddp.attempt.link.channel import Channel, Message

FULL = 0.1  # seconds to wait where no connection can be taken in


class Sockets:
    """Those of the supervisor."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def wait(self, seconds: float) -> None:
        """Wait for what comes, at most so long, and call the functions for it."""
        for key, _ in self._selector.select(seconds):
            key.data()

    def listen(self, sock: socket.socket, take: Callable[[socket.socket], None]) -> None:
        """Call a function with each new connection to a socket."""

        def accept() -> None:
            try:
                new = sock.accept()[0]
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # until others have left
                    time.sleep(FULL)
                return
            with contextlib.suppress(OSError):
                take(new)

        sock.setblocking(False)
        self.watch(sock.fileno(), accept)

    def hear(self, end: Channel, heard: Callable[[Message], None]) -> None:
        """Call a function with each message of a connection, until it is closed. A peer whose
        messages make no sense is not heard further."""
        number = end.fileno()
        if end.closed:  # before it was taken in
            return

        def read() -> None:
            try:
                for message in end.receive():
                    heard(message)
            except (LookupError, TypeError, ValueError):
                end.close()
            if end.closed:
                self.unwatch(number, read)

        self.watch(number, read)

    def watch(self, number: int, read: Callable[[], None]) -> None:
        """Call a function whenever a descriptor can be read."""
        if number in self._selector.get_map():  # a closed descriptor with the same number
            self._selector.unregister(number)
        self._selector.register(number, selectors.EVENT_READ, read)

    def unwatch(self, number: int, read: Callable[[], None]) -> None:
        """Do so no longer, if it is still this function."""
        key = self._selector.get_map().get(number)
        if key and key.data is read:
            self._selector.unregister(number)
