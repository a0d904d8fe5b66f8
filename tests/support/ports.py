"""A port that no other process picks, from the choice to the end."""

import socket

from hpcddp.attempt.rendezvous import free_port


def held() -> socket.socket:
    """Bound and not listened on: who binds with SO_REUSEADDR, as servers do, can listen there, and
    `free_port` takes it for used.

    Raises:
        OSError: another process has just taken it.
    """
    found = socket.socket()
    found.bind(("", free_port()))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return found


def number(found: socket.socket) -> int:
    """Its port."""
    return int(found.getsockname()[1])
